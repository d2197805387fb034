"""Tokens for the workers of one job, derived from the token of all workers.

Whoever holds the worker token can make them, and the control plane checks them, without a table:
a token names its job, and an HMAC under the worker token proves it.
"""

from __future__ import annotations

import hashlib
import hmac

_PREFIX = "ry-job"


def job_token(worker_token: str, namespace: str, name: str) -> str:
    """The token of the workers of one job. Names are DNS labels, so that they hold no dot."""
    return f"{_PREFIX}.{namespace}.{name}.{_proof(worker_token, namespace, name)}"


def job_of(token: str, worker_token: str) -> tuple[str, str] | None:
    """Namespace and name of the job whose token this is; None: it is no such token, or a forged one."""
    prefix, _, rest = token.partition(".")
    parts = rest.split(".")
    if prefix != _PREFIX or len(parts) != 3:
        return None
    namespace, name, proof = parts
    genuine = hmac.compare_digest(_proof(worker_token, namespace, name).encode(), proof.encode())
    return (namespace, name) if genuine else None


def _proof(worker_token: str, namespace: str, name: str) -> str:
    return hmac.new(worker_token.encode(), f"job {namespace}/{name}".encode(), hashlib.sha256).hexdigest()
