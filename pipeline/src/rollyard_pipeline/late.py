"""What the start of a worker's first sandbox does not wait for: models, HTTP, backends, stages."""

from rollyard_pipeline import httpx_alone  # noqa: F401 - before whatever imports httpx
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.control_plane.rest import RestControlPlane
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.worker.worker import Worker, WorkerOptions

__all__ = [
    "BackendClient",
    "Registry",
    "RestControlPlane",
    "Worker",
    "WorkerOptions",
]
