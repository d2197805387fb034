"""A worker in the place of a stage worker, which does what a test or a benchmark says, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import httpx

from rollyard_testing.crds.segments import reported
from rollyard_testing.page.conversations import Conversations, Step

ASKS: Final = 6
"""The number of requests in which a lease must be granted, each of which waits for some seconds."""


def untended_job(name: str, tasks: int, samples: int) -> dict[str, Any]:
    """Return the manifest of a job that needs no pool, and that no driver tends."""
    spec = {
        "tasks": {"inline": [{"id": f"task-{no:04d}", "prompt": "p"} for no in range(tasks)]},
        "handler": "shell",
        "agent": {"type": "oracle"},
        "samplesPerTask": samples,
    }
    metadata = {"name": name}
    return {"apiVersion": "rollyard.dev/v1alpha1", "kind": "RolloutJob", "metadata": metadata, "spec": spec}


class Puppet:
    """A worker that leases rollouts of one job, and reports results that it makes up.

    Args:
        http: A client with a token that may lease.
        job: The name of the job, in the namespace `default`.
        name: The name of the worker and of its node.
    """

    def __init__(self, http: httpx.Client, job: str, name: str = "puppet") -> None:
        self._http = http
        self._job = job
        self._name = name
        self._made = Conversations().trajectory(
            "Count the lines.", [Step("I look.", "wc -l x", "12 x\n"), Step("There are 12.")], ["step-1"]
        )

    def lease(self, stage: str) -> dict[str, Any]:
        """Lease one rollout for a stage.

        Raises:
            AssertionError: There was none.
        """
        return self.lease_some(stage, 1)[0]

    def lease_some(self, stage: str, count: int) -> list[dict[str, Any]]:
        """Lease so many rollouts for a stage.

        Raises:
            AssertionError: There were fewer.
        """
        ask = {"worker": self._name, "node": self._name, "wait": 5, "job": self._job, "namespace": "default"}
        leases: list[dict[str, Any]] = []
        for _ in range(ASKS):
            capacity = {"init": 0, "run": 0, "eval": 0} | {stage: count - len(leases)}
            answer = self._http.post("/v1/leases", json=ask | {"capacity": capacity}).raise_for_status()
            leases += answer.json()["leases"]
            if len(leases) == count:
                return leases
        raise AssertionError(f"{len(leases)} rollouts were leased for {stage}, and not {count}")

    def complete(self, lease: dict[str, Any], reward: float = 1.0) -> None:
        """Report that the stage of a lease is complete; Eval gives the reward.

        Raises:
            AssertionError: The report was refused.
        """
        self.complete_some([(lease, reward)])

    def complete_some(self, leases: Sequence[tuple[dict[str, Any], float]]) -> None:
        """Report that the stages of leases are complete, with the rewards that Eval gives.

        Raises:
            AssertionError: A report was refused.
        """
        results = [self._result(lease, reward) for lease, reward in leases]
        body = {"worker": self._name, "results": results}
        answer = self._http.post("/v1/leases/complete", json=body).raise_for_status()
        outcomes = {item["outcome"] for item in answer.json()["outcomes"]}
        assert outcomes == {"accepted"}, outcomes

    def _result(self, lease: dict[str, Any], reward: float) -> dict[str, Any]:
        item = {key: lease[key] for key in ("rollout", "token", "stage")}
        if lease["stage"] == "init":
            place = {"provider": "none", "id": f"{lease['rollout']}-{lease['token']}", "node": self._name}
            item["sandbox"] = place | {"address": "unix:/none"}
        elif lease["stage"] == "run":
            item["trajectory"] = self._made | {
                "id": lease["rollout"],
                "job": lease["job"],
                "task_id": lease["task"]["id"],
                "group_id": lease["group_id"],
                "sample_index": lease["sample_index"],
            }
        else:
            item["reward"] = reward
        return reported(item)

    def show(self) -> None:
        """Send a heartbeat without leases. A node of which none comes is given up, with what waits for it."""
        beat = {"worker": self._name, "node": self._name, "leases": []}
        self._http.post("/v1/leases/heartbeat", json=beat).raise_for_status()

    def beat(self, lease: dict[str, Any], texts: list[str]) -> list[str]:
        """Send a heartbeat with turns of the policy, and return the rollouts that somebody watches."""
        turns = [{"no": no, "role": "assistant", "text": text} for no, text in enumerate(texts)]
        ref = {"rollout": lease["rollout"], "token": lease["token"]}
        beat = {"worker": self._name, "node": self._name, "leases": [ref]}
        if turns:
            beat["live"] = [ref | {"turns": turns}]
        answer = self._http.post("/v1/leases/heartbeat", json=beat)
        watched: list[str] = answer.raise_for_status().json().get("watched", [])
        return watched
