"""The Secret with the token of all workers, which earlier versions put into each namespace with jobs."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.interface import Kube
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import key_of
from rollyard_operator.settings import OperatorSettings

_log = logging.getLogger(__name__)


class LegacyToken:
    """Removes the Secret where no pod mounts it. A pod that mounts it could not start without it."""

    def __init__(self, kube: Kube, settings: OperatorSettings) -> None:
        self._kube = kube
        self._settings = settings
        self._removed: set[str] = set()

    async def remove(self, namespaces: Iterable[str], pods: Iterable[Object]) -> None:
        """Remove the Secret from these namespaces. A refused deletion is retried the next time.

        Args:
            pods: All pods of this installation.
        """
        name = self._settings.worker_token_secret
        mounting = {key_of(pod)[0] for pod in pods if name in secrets_of(pod)}
        for namespace in sorted(set(namespaces) - self._removed - mounting):
            try:
                await self._kube.delete("Secret", namespace, name)
            except KubeError as error:
                _log.warning("the Secret %s/%s cannot be removed: %s", namespace, name, error)
            else:
                self._removed.add(namespace)


def secrets_of(pod: Object) -> set[str]:
    """Return the names of the Secrets that a pod mounts as volumes."""
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    return {str(volume["secret"].get("secretName")) for volume in volumes if volume.get("secret")}
