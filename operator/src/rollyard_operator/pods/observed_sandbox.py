"""A sandbox pod as the cluster shows it, and what is wrong with a pod. This module is pure data."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Hope = Literal["none", "kubelet", "scheduler", "gate"]
"""What may still solve a problem with a pod.

It is nothing, the kubelet (by a retry), the scheduler (once a node has room), or the opening of the gate.
"""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with a pod."""

    reason: str
    """A CamelCase word for programs. A claim that fails reports it."""
    message: str
    """The message as the cluster reports it."""
    since: datetime
    hope: Hope = "none"
    retryable: bool = True
    """Whether another pod may succeed."""


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
