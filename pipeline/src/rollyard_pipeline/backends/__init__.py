"""Inference backends: vLLM's and SGLang's HTTP APIs with token ids in and out."""

from rollyard_inference.sampling.request import Sampling

from rollyard_pipeline.backends.client import BackendClient
from rollyard_pipeline.backends.session import BackendSession

__all__ = ["BackendClient", "BackendSession", "Sampling"]
