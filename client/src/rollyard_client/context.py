"""Which server, and with which token: arguments, environment, or the file that `rollyard up` writes."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollyard_client.errors import ContextError

DEFAULT_URL = "http://127.0.0.1:8765"


@dataclass(frozen=True, slots=True)
class Context:
    """A server's address and the bearer token for it."""

    url: str
    token: str
    tls: ssl.SSLContext | None = None
    """Whom to trust for `https:`; default: ROLLYARD_CA_FILE or SSL_CERT_FILE, else the usual authorities."""


def context_path(env: Mapping[str, str]) -> Path:
    """`$ROLLYARD_HOME/context.json`, else `~/.config/rollyard/context.json`."""
    home = env.get("ROLLYARD_HOME")
    if home:
        return Path(home) / "context.json"
    base = env.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "rollyard" / "context.json"


def read_token(path: Path, role: str = "admin") -> str:
    """The token in a file: tokens.json, whose entry for `role` is taken, or just the token.

    Raises:
        ContextError: the file cannot be read or holds no such token.
    """
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise ContextError(f"{path}: the token file cannot be read: {error.strerror}") from error
    if not text.startswith("{"):
        if not text:
            raise ContextError(f"{path}: the token file is empty")
        return text
    try:
        token = json.loads(text)[role]
        if isinstance(token, list):
            token = token[0]  # of those that are valid, the one that is not on its way out
    except (ValueError, LookupError) as error:
        raise ContextError(f"{path}: holds no token for the role {role!r}") from error
    return str(token)


def resolve(
    url: str | None,
    token: str | None,
    env: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Context:
    """Arguments first, then ROLLYARD_URL and ROLLYARD_TOKEN, then the context file.

    Raises:
        ContextError: no token is to be found, or the context file is broken.
    """
    env = os.environ if env is None else env
    url = url or env.get("ROLLYARD_URL")
    token = token or env.get("ROLLYARD_TOKEN")
    if url and token:
        return Context(url.rstrip("/"), token, tls)
    path = context_path(env)
    document: dict[str, str] = {}
    try:
        loaded = json.loads(path.read_text())
        if not isinstance(loaded, dict):
            raise ContextError(
                f"{path}: must be a JSON object with 'url' and 'token' or 'token_file'; remove it"
            )
        document = loaded
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ContextError(f"{path}: cannot be read: {error}; remove it") from error
    url = (url or document.get("url") or DEFAULT_URL).rstrip("/")
    if not token and document.get("url", "").rstrip("/") == url:
        token = document.get("token")
        if not token and document.get("token_file"):
            token = read_token(Path(document["token_file"]))
    if not token:
        raise ContextError(
            f"no token for {url}: set ROLLYARD_TOKEN (see tokens.json in the server's state folder), "
            "or start a server of your own with `rollyard up`"
        )
    return Context(url, token, tls)
