"""Sandbox providers: bubblewrap, Apptainer, pods that a driver starts and, on request, bare processes."""

from rollyard_pipeline.sandboxes.provider import PROVIDERS, open_provider

__all__ = ["PROVIDERS", "open_provider"]
