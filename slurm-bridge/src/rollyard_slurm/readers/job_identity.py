"""Whose a Slurm job is: written into its comment, so that a bridge finds its jobs again. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollyard_drivers.reconcile.plan import Workload

from rollyard_slurm.errors import ScriptInvalid

_WORD = re.compile(r"[\w./-]*\Z")
_FIELDS = ("instance", "launch", "kind", "owner", "uid", "workload", "hash", "restarts")


@dataclass(frozen=True, slots=True)
class Identity:
    """What the comment of a job of ours says."""

    instance: str
    """The bridge's home."""
    launch: str
    """One submission; no two jobs ever have the same."""
    kind: str
    """`stage-worker` or `backend`."""
    owner: str
    """`rolloutjob/NAMESPACE/NAME` or `backendpool/NAMESPACE/NAME`."""
    uid: str
    workload: str
    hash: str
    restarts: str

    @property
    def comment(self) -> str:
        """As it stands in the job: no blanks, no quotes, so that every site's tools take it."""
        return "rollyard," + ",".join(f"{name}={getattr(self, name)}" for name in _FIELDS)


def identity(workload: Workload, instance: str, launch: str, restarts: int) -> Identity:
    """The identity of one submission.

    Raises:
        ScriptInvalid: a name holds what a job's comment cannot carry.
    """
    owner = workload.owner
    made = Identity(
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


def parse(comment: str) -> Identity | None:
    """The identity in a comment; None: it is no job of a bridge."""
    head, _, rest = comment.partition(",")
    if head != "rollyard":
        return None
    fields = dict(part.partition("=")[::2] for part in rest.split(","))
    if not set(_FIELDS) <= fields.keys() or not all(_WORD.match(fields[name]) for name in _FIELDS):
        return None
    return Identity(**{name: fields[name] for name in _FIELDS})
