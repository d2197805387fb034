"""The calls that make links to the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollyard_client.call import Call, as_json, encode

if TYPE_CHECKING:
    import httpx

PageRole = Literal["viewer", "admin"]
"""The roles of sessions of the page: a viewer may read, and an admin may also cancel."""


@dataclass(frozen=True, slots=True)
class SignInCode:
    """A one-time code, which signs a browser in to the page."""

    code: str
    role: PageRole
    expires_at: float
    """The time until which it can be used, in seconds since the epoch of the control plane's clock."""
    prefix: str
    """The path below which browsers find the page, or "" for the root."""


def make_code(role: PageRole) -> Call[SignInCode]:
    """Return the call that makes a one-time code."""

    def parse(answer: httpx.Response) -> SignInCode:
        document = as_json(answer)
        return SignInCode(document["code"], document["role"], document["expires_at"], document["prefix"])

    # A code that nobody receives expires by itself, so the call may be repeated.
    return Call("POST", "/v1/session/codes", parse, body=encode({"role": role}))


def prefix() -> Call[str]:
    """Return the call that asks for the page's path prefix."""
    return Call("GET", "/v1/session", lambda answer: str(as_json(answer).get("prefix", "")))


def end_all() -> Call[int]:
    """Return the call that ends sessions and codes, and counts them."""
    return Call("DELETE", "/v1/sessions", lambda answer: int(as_json(answer)["ended"]))
