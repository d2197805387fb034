"""The namespaces that the API server lets the operator read."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rollyard_operator.kube.errors import KubeError

_log = logging.getLogger(__name__)


class NamespaceAccess:
    """Collects what the reflectors of each namespace may read.

    The contents of a `denied` namespace are unknown. An object that is missing in the caches may exist there.
    """

    def __init__(self) -> None:
        self._refusals: dict[str, set[str]] = {}

    @property
    def denied(self) -> frozenset[str]:
        """The namespaces in which at least one kind of object may not be read."""
        return frozenset(self._refusals)

    def reporter(self, namespace: str | None, kind: str) -> Callable[[KubeError | None], None]:
        """Return the callback for a reflector of one kind. It takes a refusal, or None after a read."""

        def report(refused: KubeError | None) -> None:
            if namespace is None:
                return
            kinds = self._refusals.get(namespace, set())
            if refused is not None:
                if not kinds:
                    _log.warning("namespace %s is left alone until it may be read: %s", namespace, refused)
                self._refusals[namespace] = kinds | {kind}
            elif kind in kinds:
                kinds.discard(kind)
                if not kinds:
                    del self._refusals[namespace]
                    _log.info("namespace %s may be read again", namespace)

        return report
