"""Fixtures of the tests' cluster, and of this checkout's images on it."""

from __future__ import annotations

from rollyard_testing.kubernetes.kubelab import Cluster, cluster, images

__all__ = ["Cluster", "cluster", "images"]
