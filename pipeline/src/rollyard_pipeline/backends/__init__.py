"""Inference backends: vLLM's HTTP API with token ids in and out."""

from rollyard_pipeline.backends.client import BackendClient, Sampling
from rollyard_pipeline.backends.session import BackendSession

__all__ = ["BackendClient", "BackendSession", "Sampling"]
