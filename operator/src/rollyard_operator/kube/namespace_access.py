"""Which namespaces the API server lets the operator read."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rollyard_operator.kube.client import KubeError

_log = logging.getLogger(__name__)


class NamespaceAccess:
    """Collects what the reflectors of each namespace may read.

    Nothing is known of what exists in a namespace that is `denied`: what is missing in the caches may well be
    there.
    """

    def __init__(self) -> None:
        self._refusals: dict[str, set[str]] = {}

    @property
    def denied(self) -> frozenset[str]:
        """The namespaces of which at least one kind of objects may not be read."""
        return frozenset(self._refusals)

    def reporter(self, namespace: str | None, kind: str) -> Callable[[KubeError | None], None]:
        """Return what a reflector of one kind calls with a refusal, or with None after it could read."""

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
