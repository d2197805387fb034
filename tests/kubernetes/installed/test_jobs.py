"""Jobs from kubectl and from REST, through to both outcomes; what may change while they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from installedchart import HOLD, condition, is_so, job, pool, task
from rollyard_client import NotFound

if TYPE_CHECKING:
    from installedchart import Installation
    from rollyard_client import Client

pytestmark = [pytest.mark.kubernetes, pytest.mark.real, pytest.mark.timeout(240)]


def gone_from_rest(client: Client, name: str) -> bool:
    try:
        client.job(name)
    except NotFound:
        return True
    return False


def test_an_applied_job_succeeds_and_its_trajectories_are_in_rest(installation: Installation) -> None:
    with installation.made(job("good", task("a"), task("b"), samplesPerTask=2)):
        installation.wait("rj", "good", "Succeeded")
        found = installation.get("rj", "good")
        assert found is not None
        assert found["status"]["phase"] == "Succeeded"
        assert found["status"]["observedGeneration"] == found["metadata"]["generation"]
        assert found["status"]["counts"]["succeeded"] == found["status"]["counts"]["total"] == 4
        reasons = {one["reason"] for one in installation.events("good")}
        assert {"Admitted", "Running", "Succeeded"} <= reasons
        with installation.client() as client:
            assert (
                client.job("good").metadata.annotations["rollyard.dev/object-uid"] == found["metadata"]["uid"]
            )
            rewards = sorted(
                (one.task_id, one.sample_index, one.reward) for one in client.trajectories("good")
            )
        assert rewards == [("a", 0, 1.0), ("a", 1, 1.0), ("b", 0, 1.0), ("b", 1, 1.0)]
        installation.until(lambda: not installation.pods(), "the workers of a finished job go")
