"""What identifies a job as one of a bridge: the bridge writes it into the job's comment. This module is pure.

By the comment, a bridge finds its jobs again after a restart, and leaves the jobs of other bridges alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollyard_drivers.reconcile.plan import Workload

from rollyard_slurm.errors import ScriptInvalid

_WORD = re.compile(r"[\w./-]*\Z")
_FIELDS = ("instance", "launch", "kind", "owner", "uid", "workload", "hash", "restarts")


@dataclass(frozen=True, slots=True)
class SlurmJobIdentity:
    """The content of the comment of one job."""

    instance: str
    """The home of the bridge."""
    launch: str
    """The submission; no two jobs ever share one."""
    kind: str
    """`stage-worker` or `backend`."""
    owner: str
    """`rolloutjob/NAMESPACE/NAME` or `backendpool/NAMESPACE/NAME`."""
    uid: str
    workload: str
    hash: str
    restarts: str

    @classmethod
    def of(cls, workload: Workload, instance: str, launch: str, restarts: int) -> SlurmJobIdentity:
        """Makes the identity of one submission.

        Raises:
            ScriptInvalid: A name has characters that the comment of a job cannot carry.
        """
        owner = workload.owner
        made = cls(
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
            if not _WORD.match(getattr(made, name)):
                raise ScriptInvalid(
                    f"{name} {getattr(made, name)!r}: a job's comment takes letters, digits and ._/- only"
                )
        return made

    @classmethod
    def parse(cls, comment: str) -> SlurmJobIdentity | None:
        """Reads the identity in a comment; returns None where the job is not one of a bridge."""
        head, _, rest = comment.partition(",")
        if head != "rollyard":
            return None
        fields = dict(part.partition("=")[::2] for part in rest.split(","))
        if not set(_FIELDS) <= fields.keys() or not all(_WORD.match(fields[name]) for name in _FIELDS):
            return None
        return cls(**{name: fields[name] for name in _FIELDS})

    @property
    def comment(self) -> str:
        """The comment of the job; it has no blanks and no quotes, so that every site's tools accept it."""
        return "rollyard," + ",".join(f"{name}={getattr(self, name)}" for name in _FIELDS)
