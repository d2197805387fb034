"""Sandbox providers: bubblewrap, pods that a driver starts, and bare processes where asked for by name."""

from rollyard_pipeline.sandboxes.factory import PROVIDERS, open_provider

__all__ = ["PROVIDERS", "open_provider"]
