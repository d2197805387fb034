"""The rollyard command line and the local driver. `from rollyard import Client` gives the SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard_client import AsyncClient, Client

    from rollyard.jobs.evaluation import evaluate

    __version__: str

__all__ = ["AsyncClient", "Client", "__version__", "evaluate"]


def __getattr__(name: str) -> Any:
    # These are imported at first use, because `rollyard --help` must not import an HTTP client.
    if name == "__version__":
        from rollyard_process.version import installed_version

        return installed_version()
    if name == "evaluate":
        from rollyard.jobs.evaluation import evaluate

        return evaluate
    if name in __all__:
        import rollyard_client

        return getattr(rollyard_client, name)
    raise AttributeError(f"module 'rollyard' has no attribute {name!r}")
