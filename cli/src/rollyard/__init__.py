"""The rollyard command line and the local driver; `from rollyard import Client` is the SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard_client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    # Lazily, so that `rollyard --help` does not pay for an HTTP client.
    if name in __all__:
        import rollyard_client

        return getattr(rollyard_client, name)
    raise AttributeError(f"module 'rollyard' has no attribute {name!r}")
