"""The proof that a connection ends at the server: a keyed hash of the client's random challenge.

The worker gives the server a secret before any command runs, and whoever takes the server's socket later does
not know it and cannot answer (BLAKE2b with a key, RFC 7693). Where both are on one node, the secret comes on
a descriptor that is read and closed at once. A pod's server starts with no more than the SHA-256 of its
token, and learns it from the first client that shows it: no command can have run before. Later clients
show a value that is derived from the token, and the proof is keyed with another one. Who receives the first
value, in the server's place, can compute neither the token nor the second.
"""

from __future__ import annotations

import os

try:
    from _blake2 import blake2b  # hashlib would load OpenSSL, for which every sandbox's start would wait
except ImportError:
    from hashlib import blake2b

SECRET_BYTES = 32
_CHALLENGE_BYTES = 32
_MAX_CHALLENGE = 256  # characters
PROVEN = "v2."
"""Begins the text of a token that the server has seen once, and must prove to know."""
TOKEN_PROOF = "token_proof"
"""The server's feature where it proves from now on that it knows the token that it has been shown."""


def new_challenge() -> str:
    """A challenge that was never asked before."""
    return os.urandom(_CHALLENGE_BYTES).hex()


def answer(secret: bytes, purpose: str, challenge: object) -> str:
    """What proves knowledge of `secret`, or "" for something that is no challenge.

    Args:
        purpose: what the challenge was sent with, so that an answer fits one kind of request only.
    """
    if not isinstance(challenge, str) or len(challenge) > _MAX_CHALLENGE:
        return ""
    text = f"rollyard exec server {purpose} {challenge}".encode("utf-8", "surrogatepass")
    return blake2b(text, key=secret).hexdigest()


def derived(token: str) -> tuple[str, bytes]:
    """What clients show in the place of a token that the server has seen, and the key of the proof.

    Neither can be computed from the other one or from the token's SHA-256.
    """
    text = token.encode("utf-8", "surrogatepass")
    shown, key = (
        blake2b(b"rollyard exec server " + purpose + text, digest_size=SECRET_BYTES)
        for purpose in (b"shown ", b"proof ")
    )
    return shown.hexdigest(), key.digest()


def read_secret(descriptor: int) -> bytes:
    """The secret that the other end of a pipe has written; the descriptor is closed.

    Raises:
        ValueError: it is not SECRET_BYTES long.
    """
    with open(descriptor, "rb") as file:
        secret = file.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the secret has {len(secret)} bytes, and must have {SECRET_BYTES}")
    return secret
