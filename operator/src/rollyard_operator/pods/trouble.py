"""The trouble of a pod: what is wrong with it, and what may still solve it. This module is pure data."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Hope = Literal["none", "kubelet", "scheduler", "gate"]
"""What may still solve a problem with a pod.

This is nothing, the kubelet (by a retry), the scheduler (once a node has room), or the opening of the gate.
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
