"""A sandbox pod as the cluster shows it, for the planner of sandboxes. This module is pure data."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from rollyard_operator.pods.trouble import Trouble

SandboxState = Literal["starting", "ready", "failed", "stopping"]


@dataclass(frozen=True, slots=True)
class ObservedSandbox:
    """A sandbox pod as the cluster shows it."""

    namespace: str
    name: str
    uid: str
    flavor: str
    """The hash of everything that the pod was made from."""
    claim: str
    """The id of the claim that the pod belongs to, or empty if it is warm and unclaimed."""
    state: SandboxState
    created_at: datetime
    address: str = ""
    """The `tcp://host:port` of its exec server, if the pod is ready."""
    trouble: Trouble | None = None
    usable: bool = True
    """False if the secret of the pod is not known any more."""
    gone_due: datetime | None = None
    """The time by which a stopping pod should be gone."""
