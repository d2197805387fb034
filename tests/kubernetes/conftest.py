"""Fixtures of the tests' cluster, of this checkout's images on it, and of a small installation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rollyard_testing.kubernetes.faultrun import TASKS
from rollyard_testing.kubernetes.installed import Release, a_release
from rollyard_testing.kubernetes.kubelab import Cluster, cluster, images

__all__ = ["Cluster", "cluster", "images"]


@pytest.fixture(scope="session")
def release(cluster: Cluster, images: str) -> Iterator[Release]:
    """Yield one installation for all tests that kill parts of jobs."""
    with a_release(cluster, images, TASKS) as made:
        yield made
