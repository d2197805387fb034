"""Inference backends: vLLM's and SGLang's HTTP APIs with token ids in and out."""

from rollyard_pipeline.backends.client import BackendClient
from rollyard_pipeline.backends.session import BackendSession
from rollyard_pipeline.backends.wire import Sampling

__all__ = ["BackendClient", "BackendSession", "Sampling"]
