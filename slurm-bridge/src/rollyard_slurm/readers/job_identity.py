"""The identity of a Slurm job that a bridge submitted. This module is pure.

The bridge writes the identity into the job's comment. By this comment, it finds its jobs again after a
restart and leaves the jobs of other bridges alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from rollyard_drivers.reconcile.plan import Workload

from rollyard_slurm.errors import SlurmError

_WORD: Final = re.compile(r"[\w./-]*\Z")
_FIELDS: Final = ("instance", "launch", "kind", "owner", "uid", "workload", "hash", "restarts")


@dataclass(frozen=True, slots=True)
class SlurmJobIdentity:
    """The identity of one job, which is the content of its comment."""

    instance: str
    """The name of the bridge's home."""
    launch: str
    """The name of the submission. It is different for every job."""
    kind: str
    """The kind of the workload, `stage-worker` or `backend`."""
    owner: str
    """The owner of the workload, as `rolloutjob/NAMESPACE/NAME` or `backendpool/NAMESPACE/NAME`.

    For a worker that stood ready when its job was submitted, it is `readyworker/NAMESPACE/NAME`.
    """
    uid: str
    workload: str
    hash: str
    restarts: str

    @classmethod
    def of(cls, workload: Workload, instance: str, launch: str, restarts: int) -> SlurmJobIdentity:
        """Return the identity of one submission.

        Raises:
            SlurmError: A name contains characters that are not allowed in the comment of a job.
        """
        owner = workload.owner
        identity = cls(
            instance=instance,
            launch=launch,
            kind=workload.kind,
            owner=f"{owner.kind.lower()}/{owner.namespace}/{owner.name}",
            uid=owner.uid or "-",
            workload=workload.name,
            hash=workload.spec_hash,
            restarts=str(restarts),
        )
        for name in _FIELDS:
            if not _WORD.match(getattr(identity, name)):
                raise SlurmError(
                    f"{name} {getattr(identity, name)!r}: a job's comment takes letters, digits and "
                    "._/- only",
                    reason="ScriptInvalid",
                )
        return identity

    @classmethod
    def parse(cls, comment: str) -> SlurmJobIdentity | None:
        """Read the identity from a comment. Return None if no bridge submitted the job."""
        head, _, rest = comment.partition(",")
        if head != "rollyard":
            return None
        fields = dict(part.partition("=")[::2] for part in rest.split(","))
        if not set(_FIELDS) <= fields.keys() or not all(_WORD.match(fields[name]) for name in _FIELDS):
            return None
        return cls(**{name: fields[name] for name in _FIELDS})

    @property
    def comment(self) -> str:
        """The comment of the job. It has no blanks and no quotes, because some sites' tools reject them."""
        return "rollyard," + ",".join(f"{name}={getattr(self, name)}" for name in _FIELDS)
