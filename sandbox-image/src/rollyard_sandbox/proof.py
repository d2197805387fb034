"""The proof that a connection ends at the server: a keyed hash of the client's random challenge.

The worker gives the server a secret before any command runs. A process that takes the server's socket later
does not know the secret and cannot answer (BLAKE2b with a key, RFC 7693). If both are on one node, the secret
comes on a descriptor that is read and closed at once. A pod's server starts with only the SHA-256 of its
token, and learns the token from the first client that shows it, before any command can have run. Later
clients show a value that is derived from the token, and the proof is keyed with another derived value. A
process that receives the first value, in the server's place, can compute neither the token nor the second.
"""

from __future__ import annotations

import os

try:
    # Importing hashlib would load OpenSSL, which would delay the start of every sandbox.
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

TYPE_CHECKING = False  # `typing` is slow to import, and the server must start fast.
if TYPE_CHECKING:
    from typing import Final

SECRET_BYTES: Final = 32
_CHALLENGE_BYTES: Final = 32
_MAX_CHALLENGE: Final = 256  # characters
PROVEN: Final = "proven."
"""The prefix of a token that the server has seen once, and must prove to know."""


def new_challenge() -> str:
    """Return a random challenge that was never used before."""
    return os.urandom(_CHALLENGE_BYTES).hex()


def answer(secret: bytes, purpose: str, challenge: object) -> str:
    """Return the answer that proves knowledge of `secret`, or "" if `challenge` is not a challenge.

    Args:
        purpose: The kind of request with which the challenge was sent. An answer fits this kind only.
    """
    if not isinstance(challenge, str) or len(challenge) > _MAX_CHALLENGE:
        return ""
    text = f"rollyard exec server {purpose} {challenge}".encode("utf-8", "surrogatepass")
    return blake2b(text, key=secret).hexdigest()


def derived(token: str) -> tuple[str, bytes]:
    """Return what clients show instead of a token that the server has seen, and the key of the proof.

    Neither can be computed from the other one or from the token's SHA-256.
    """
    text = token.encode("utf-8", "surrogatepass")
    shown, key = (
        blake2b(b"rollyard exec server " + purpose + text, digest_size=SECRET_BYTES)
        for purpose in (b"shown ", b"proof ")
    )
    return shown.hexdigest(), key.digest()


def read_secret(descriptor: int) -> bytes:
    """Return the secret that the other end of a pipe has written, and close the descriptor.

    Raises:
        ValueError: The secret is not SECRET_BYTES long.
    """
    with open(descriptor, "rb") as file:
        secret = file.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the secret has {len(secret)} bytes, and must have {SECRET_BYTES}")
    return secret
