"""Tokens for ready workers, derived from the token of all workers.

A ready token names one ready worker by its namespace and its name, and an HMAC under the worker token proves
it. Its holder may only ask for the assignment of that worker, which brings the token of one job.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Final

_PREFIX: Final = "ry-ready"
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ReadyIdentity:
    """The ready worker that a token was made for."""

    namespace: str
    worker: str


def ready_token(worker_token: str, namespace: str, worker: str) -> str:
    """Return the token of one ready worker.

    Args:
        worker_token: The token of all workers, under which the proof is made.
        namespace: The namespace whose jobs the worker may be assigned to, which is a DNS label.
        worker: The name of the ready worker, which is a DNS label and is never used for another one.

    Raises:
        ValueError: A name is not a DNS label; a dot, for example, would separate other parts.
    """
    for part, text in (("namespace", namespace), ("name", worker)):
        if _LABEL.fullmatch(text) is None:
            raise ValueError(
                f"a ready token needs the ready worker's {part}, and {text!r} is not a DNS label"
            )
    return f"{_PREFIX}.{namespace}.{worker}.{_proof(worker_token, namespace, worker)}"


def ready_worker_of(token: str, worker_token: str) -> ReadyIdentity | None:
    """Return the ready worker that a token was made for, or None if it is another token or a forged one."""
    prefix, *parts = token.split(".", 4)
    if prefix != _PREFIX or len(parts) != 3:
        return None
    namespace, worker, proof = parts
    genuine = hmac.compare_digest(_proof(worker_token, namespace, worker).encode(), proof.encode())
    return ReadyIdentity(namespace, worker) if genuine else None


def _proof(worker_token: str, namespace: str, worker: str) -> str:
    message = f"ready {namespace}/{worker}".encode()
    return hmac.new(worker_token.encode(), message, hashlib.sha256).hexdigest()
