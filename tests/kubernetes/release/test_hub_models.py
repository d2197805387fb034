"""A pool whose model is on the hub: each reason why there is none, then a cache, a token, and a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rollyard_testing.hub import TOKEN, HubModel
from rollyard_testing.invariants import invariant
from rollyard_testing.kubernetes.installedchart import SMALL_POD, pool

if TYPE_CHECKING:
    from rollyard_testing.hub import Hub
    from rollyard_testing.kubernetes.installedchart import Installation

TINY = Path(__file__).parents[3] / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"

pytestmark = pytest.mark.kubernetes


@pytest.mark.attack(
    "its author reads the token of the Hugging Face Hub in a pod, an object or a log",
    boundary="kubernetes",
    surface="models of the Hugging Face Hub",
    stopped_by="pods name the Secret; only init containers and workers have its value as a variable",
)
def test_a_gated_model_of_the_hub_serves_a_job(
    installation: Installation, hub: Hub, tmp_path_factory: pytest.TempPathFactory
) -> None:
    hub.models["tiny/tiny-policy"] = HubModel(TINY, gated=True)
    cluster, where = installation.cluster, installation.jobs
    cluster.volume(where, tmp_path_factory.mktemp("hub"))
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub-token"}}
    try:
        with installation.made(pool("of-hub", model="tiny/tiny-policy", template=SMALL_POD)):
            installation.until_condition("bp", "of-hub", "Ready", 'secret "hub-token" not found')
            with installation.made({**secret, "stringData": {"HF_TOKEN": "hf_other"}}):
                installation.until_condition(
                    "bp", "of-hub", "Ready", "the account of the token has no access"
                )
                installation.until_condition("bp", "of-hub", "Degraded", "accept its licence", status="True")
            with installation.made({**secret, "stringData": {"HF_TOKEN": TOKEN}}):
                installation.until_condition("bp", "of-hub", "Ready", "BackendsReady", status="True")
                hub.requests.clear()
                with installation.made(sums()):
                    installation.wait("rj", "sums", "Succeeded")
                    with installation.client() as client:
                        (trajectory,) = client.trajectories("sums")
                    assert any(any(segment.loss_mask) for segment in trajectory.segments)
                    pods = json.dumps(installation.pods())
                assert hub.requests == [], "the workers share the cache"
                (backend,) = installation.pods("backend")
                name = backend["metadata"]["name"]
                server = cluster.kubectl("exec", "-n", where, name, "-c", "backend", "--", "env")
                log = cluster.kubectl("logs", "-n", where, name, "-c", "model")
                with invariant():
                    assert TOKEN not in pods + server + log
                    assert "HF_TOKEN" not in server
    finally:
        cluster.remove_volume(where)


def sums() -> dict[str, object]:
    """Return a job that samples from the pool."""
    stages = {stage: {"template": SMALL_POD} for stage in ("init", "run", "eval")}
    spec = {
        "tasks": {"inline": [{"id": "a", "prompt": "2 + 2 = ?", "answer": "4"}]},
        "handler": "math",
        "agent": {"type": "single_turn"},
        "sampling": {"maxTokens": 4},
        "backendRef": {"name": "of-hub"},
        "stages": stages,
    }
    return {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "sums"},
        "spec": spec,
    }
