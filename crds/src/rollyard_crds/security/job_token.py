"""Tokens for the workers of one job, derived from the token of all workers.

Whoever holds the worker token can make them, and the control plane checks them without a table:
a token names its job by namespace, name and uid, and an HMAC under the worker token proves it.
A job that is deleted and made again under its name has another uid, so that tokens of the old one are not
valid for the new one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Final

_PREFIX: Final = "ry-job"
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_UID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The job that a token speaks for."""

    namespace: str
    name: str
    uid: str
    """As `metadata.uid` of the job or of its Kubernetes object."""


def job_token(worker_token: str, namespace: str, name: str, uid: str) -> str:
    """Return the token of the workers of one job.

    Args:
        worker_token: the token of all workers, which proves it.
        namespace: a DNS label.
        name: a DNS label.
        uid: `metadata.uid` of the job as REST returns it, or of its Kubernetes object.

    Raises:
        ValueError: a part is malformed; a dot, for example, would separate other parts.
    """
    for part, text, form in (("namespace", namespace, _LABEL), ("name", name, _LABEL), ("uid", uid, _UID)):
        if form.fullmatch(text) is None:
            raise ValueError(f"a job token needs the job's {part}, and {text!r} is none")
    return f"{_PREFIX}.{namespace}.{name}.{uid}.{_proof(worker_token, f'job {namespace}/{name} {uid}')}"


def job_of(token: str, worker_token: str) -> JobIdentity | None:
    """Return the job whose token this is, or None where it is not such a token, or a forged one."""
    prefix, *parts = token.split(".", 5)
    if prefix != _PREFIX or len(parts) != 4:
        return None
    namespace, name, uid, proof = parts
    expected = _proof(worker_token, f"job {namespace}/{name} {uid}")
    genuine = hmac.compare_digest(expected.encode(), proof.encode())
    return JobIdentity(namespace, name, uid) if genuine else None


def _proof(worker_token: str, message: str) -> str:
    return hmac.new(worker_token.encode(), message.encode(), hashlib.sha256).hexdigest()
