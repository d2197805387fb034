"""The choice of a server, a token and trusted authorities: arguments, environment, file of `rollyard up`."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard_client.environment import CA_FILE
from rollyard_client.errors import ContextError

DEFAULT_URL: Final = "http://127.0.0.1:8765"


@dataclass(frozen=True, slots=True)
class Context:
    """A server's address and the bearer token for it."""

    url: str
    token: str
    tls: ssl.SSLContext | None = None
    """The authorities to trust for `https:`. None selects those of ROLLYARD_CA_FILE or SSL_CERT_FILE, or else
    the usual public authorities."""


def context_path(env: Mapping[str, str]) -> Path:
    """Return the path of the context file.

    It is `$ROLLYARD_HOME/context.json`, or else `rollyard/context.json` in `$XDG_CONFIG_HOME`, which is
    `~/.config` by default.
    """
    home = env.get("ROLLYARD_HOME")
    if home:
        return Path(home) / "context.json"
    base = env.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "rollyard" / "context.json"


def read_token(path: Path, role: str = "admin") -> str:
    """Return the token that a file holds.

    The file is a tokens.json, whose entry for `role` is returned, or holds just the token.

    Raises:
        ContextError: The file cannot be read, or it holds no such token.
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
            token = token[0]  # The first of the valid tokens is the one that is not about to be retired.
    except (ValueError, LookupError) as error:
        raise ContextError(f"{path}: holds no token for the role {role!r}") from error
    return str(token)


def resolve(
    url: str | None,
    token: str | None,
    env: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Context:
    """Return the context from the arguments, else ROLLYARD_URL and ROLLYARD_TOKEN, else the context file.

    Raises:
        ContextError: No token is found, or the context file is broken.
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
    is_named = bool(url or document.get("url"))
    url = (url or document.get("url") or DEFAULT_URL).rstrip("/")
    if not token and document.get("url", "").rstrip("/") == url:
        token = document.get("token")
        if not token and document.get("token_file"):
            token = read_token(Path(document["token_file"]))
    if not token and not is_named:
        raise ContextError(
            f"no server at {url} is known here; start one with `rollyard up`, or name one with ROLLYARD_URL "
            "and ROLLYARD_TOKEN (see tokens.json in its state folder)"
        )
    if not token:
        raise ContextError(
            f"no token for {url}: set ROLLYARD_TOKEN (see tokens.json in the server's state folder), "
            "or start a server of your own with `rollyard up`"
        )
    return Context(url, token, tls)


def verify(context: Context) -> ssl.SSLContext:
    """Return the context that checks the server's certificate, by default with the usual public authorities.

    Raises:
        ContextError: The file that the environment names cannot be used.
    """
    if context.tls is not None:
        return context.tls
    if not context.url.startswith("https:"):
        # This context trusts no authority, and no connection needs one. Reading the usual ones takes 30 ms.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    name = CA_FILE if os.environ.get(CA_FILE) else "SSL_CERT_FILE"
    path = os.environ.get(name)
    if not path:
        import certifi

        return ssl.create_default_context(cafile=certifi.where())
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # SSLError is a subclass of OSError.
        raise ContextError(f"{name}={path}: cannot be used: {error.strerror or error}") from error
