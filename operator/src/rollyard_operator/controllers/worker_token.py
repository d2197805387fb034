"""The tokens of stage workers: one Secret for each job, with a token that is valid for this job only.

The operator derives these tokens from the token of all workers, which never leaves its own file. The operator
may create Secrets but not read them, so a Secret is never changed. Its name contains a hash of its content,
and workers that mount an earlier Secret are replaced.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from rollyard_crds import RolloutJob
from rollyard_crds.base import API_VERSION
from rollyard_crds.security.job_token import job_token
from rollyard_crds.security.ready_token import ready_token

from rollyard_operator.kube import labels
from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.errors import KubeConflict, KubeError
from rollyard_operator.kube.labels import Object
from rollyard_operator.pods.parts import digest
from rollyard_operator.settings import OperatorSettings


@dataclass(frozen=True, slots=True)
class JobSecret:
    """The Secret that the workers of one job mount."""

    name: str
    """The deterministic name. Another job, token or certificate authority gives another name."""
    data: tuple[tuple[str, bytes], ...]
    """The keys `token` and, if the control plane has its own certificate authority, `ca.crt`."""

    def __repr__(self) -> str:
        return f"JobSecret({self.name!r})"


class WorkerToken:
    """Makes the Secrets of jobs from the operator's own file, which is read again for each Secret."""

    def __init__(self, kube: KubeClient, settings: OperatorSettings) -> None:
        self._kube = kube
        self._settings = settings

    def state(self) -> str:
        """Return a hash of what all Secrets are made from. It changes with the token of all workers.

        Raises:
            KubeError: The operator's own file cannot be read, or it is empty.
        """
        return digest(self._worker_token(), self._authority())

    def of(self, job: RolloutJob) -> JobSecret:
        """Return the Secret of one job, which may not exist yet.

        Raises:
            KubeError: The operator's own file cannot be read, or it is empty.
        """
        meta = job.metadata
        uid = meta.uid or ""
        data = self._data(job_token(self._worker_token(), meta.namespace, meta.name, uid))
        return JobSecret(f"{labels.JOB_SECRET_PREFIX}{uid}-{digest(data)}", tuple(data))

    def of_ready(self, namespace: str, worker: str) -> list[tuple[str, bytes]]:
        """Return the data of the Secret of a worker that stands ready.

        Raises:
            KubeError: The operator's own file cannot be read, or it is empty.
        """
        return self._data(ready_token(self._worker_token(), namespace, worker))

    def _data(self, token: str) -> list[tuple[str, bytes]]:
        data = [("token", token.encode())]
        if (authority := self._authority()) is not None:
            data.append(("ca.crt", authority))
        return data

    async def ensure(self, job: RolloutJob, secret: JobSecret) -> None:
        """Make sure that the Secret exists. It is deleted together with its job.

        Raises:
            KubeError: The API server refused the Secret.
        """
        try:
            await self._kube.create(secret_object(job, secret, self._settings))
        except KubeConflict:
            return  # An earlier pass made the Secret.

    def _worker_token(self) -> str:
        path = self._settings.worker_token_file
        token = _read(path).decode(errors="replace").strip()
        if not token:
            raise KubeError(0, "WorkerTokenUnreadable", f"{path} is empty")
        return token

    def _authority(self) -> bytes | None:
        path = self._settings.control_plane_ca_file
        return None if path is None else _read(path)


def secret_object(job: RolloutJob, secret: JobSecret, settings: OperatorSettings) -> Object:
    """Return the Secret in the form that the API server expects."""
    meta = job.metadata
    uid = meta.uid or ""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret.name,
            "namespace": meta.namespace,
            "labels": labels.own_labels(settings.instance, "stage-worker")
            | {labels.JOB: meta.name, labels.JOB_UID: uid},
            "ownerReferences": [labels.owner_reference(API_VERSION, "RolloutJob", meta.name, uid)],
        },
        "type": "Opaque",
        "immutable": True,
        "data": {key: base64.b64encode(value).decode() for key, value in secret.data},
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KubeError(0, "WorkerTokenUnreadable", f"{path}: {error.strerror}") from error
