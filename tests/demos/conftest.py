"""The cluster, and this checkout's images on it."""

from rollyard_testing.kubernetes.kubelab import cluster, images

__all__ = ["cluster", "images"]
