"""The workers' token: a Secret in each namespace with jobs, kept from the operator's own file."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

from rollyard_operator import labels
from rollyard_operator.kube import Kube, KubeError
from rollyard_operator.settings import OperatorSettings

AGAIN_SECONDS = 300.0
"""It is applied again this long after the last time: a new token, or one that somebody deleted."""


class WorkerToken:
    """Applies the Secret where it is needed. The operator may write Secrets, and read none."""

    def __init__(self, kube: Kube, settings: OperatorSettings) -> None:
        self._kube = kube
        self._settings = settings
        self._applied: dict[str, float] = {}

    async def ensure(self, namespace: str) -> None:
        """The Secret is there, but for a deletion in the last minutes.

        Raises:
            KubeError: the API server refused it, or the operator's own file cannot be read.
        """
        settings, now = self._settings, asyncio.get_running_loop().time()
        if namespace == settings.release_namespace:
            return  # there it is the installation's own
        if now - self._applied.get(namespace, -AGAIN_SECONDS) < AGAIN_SECONDS:
            return
        data = {"token": _read(settings.worker_token_file).strip()}
        if settings.control_plane_ca_file is not None:
            data["ca.crt"] = _read(settings.control_plane_ca_file)
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        await self._kube.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {
                    "name": settings.worker_token_secret,
                    "namespace": namespace,
                    "labels": {
                        labels.NAME: "rollyard",
                        labels.MANAGED_BY: labels.MANAGER,
                        labels.INSTANCE: settings.instance,
                    },
                },
                "type": "Opaque",
                "data": encoded,
            }
        )
        self._applied[namespace] = now


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KubeError(0, "WorkerTokenUnreadable", f"{path}: {error.strerror}") from error
