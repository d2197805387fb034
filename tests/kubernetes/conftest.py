"""The cluster of the tests, and this checkout's images on it."""

from __future__ import annotations

from kubelab import Cluster, cluster, images

__all__ = ["Cluster", "cluster", "images"]
