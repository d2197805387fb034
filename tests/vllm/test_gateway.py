"""An agent of one's own on real vLLM: through the gateway it leaves what our own agent leaves with its seeds.

The server is asked for one turn at a time and keeps no prefixes, since either would change the last bits of
its logits, and with them, once in a while, a token.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from rollyard_testing.invariants import invariant
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience
from rollyard_testing.vllm.checker import Answer, Pass, judge
from rollyard_testing.vllm.checkpoints import perturbed
from rollyard_testing.vllm.forward import Forward
from rollyard_testing.vllm.product import a_product
from rollyard_testing.vllm.proxy import recording
from rollyard_testing.vllm.servers import VllmServer
from rollyard_testing.vllm.stage import Stage, Trajectory

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/harness"
MODEL = ROOT / "examples/tiny-policy/hf"
TASKS = [json.loads(line) for line in (ROOT / "examples/quickstart/tasks.jsonl").read_text().splitlines()]
LONGER = TASKS[1:2]
"""A task whose first rollout has several turns, with the seeds of the example's job."""
POOL, SECONDS = "tiny", patience(180.0)
SLOW = 0.1
"""The share of the time for which the server computes, so that an update comes in the middle of a turn."""
AGENTS = ("native", "harness")

pytestmark = pytest.mark.usefixtures("bubblewrap_works")


def agent(kind: str) -> dict[str, Any]:
    """Return the example's agent, or our own with the same tools and limits."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text())["spec"]["agent"]
    if kind == "harness":
        return spec | {"files": {"agent.py": (EXAMPLE / "agent.py").read_text()}}
    limits = {name: spec[name] for name in ("maxTurns", "maxContextTokens")}
    return {"type": "tools", "tools": ["bash", "submit"], **limits}


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint, and the log-probabilities by which a reload of it is verified."""

    folder: Path
    reference: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Played:
    """The rollouts of one job by task and sample, and the answers that the server gave meanwhile."""

    trajectories: dict[tuple[str, int], Trajectory]
    served: list[Answer]
    old: str
    new: str
    tokenized: int
    """The tokens of prompts that the gateway has made of text, by the control plane's metric."""

    def versions(self, one: Trajectory) -> list[str]:
        """Return which weights each sampled token is from: `old` or `new`."""
        names = {self.old: "old", self.new: "new"}
        return [
            names[version]
            for segment in one["segments"]
            for version, mask in zip(segment["policy_versions"], segment["loss_mask"], strict=True)
            if mask
        ]


class Lab:
    """A product with one server of the tiny policy, which plays jobs with either agent."""

    def __init__(self, there: Stage, server: VllmServer, weights: dict[str, Weights]) -> None:
        self._there = there
        self._server = server
        self._weights = weights
        self._seen: set[tuple[str, int]] = set()
        self._version = server.version()
        self._loaded = "first"
        self._numbers = itertools.count(1)
        there.product.worker("w0", "--sandbox", "bubblewrap", run=1)
        there.product.pool(POOL, there.urls, MODEL)

    def play(
        self, kind: str, name: str, tasks: list[dict[str, Any]], samples: int, update: str = ""
    ) -> Played:
        """Play a job, with other weights from the second turn on or in the middle of the first one."""
        before, tokenized, job = self._version, self._tokenized(), f"{kind}-{name}"
        if update == "second turn":
            with self._there.proxies[0].holding(1) as reached:
                expected = self._submit(job, kind, tasks, samples)
                self._until(reached.exists)
                self.load("second")
        elif update == "first turn":
            with self._server.slowed(SLOW):
                expected = self._submit(job, kind, tasks, samples)
                self._until(lambda: self._server.metric("vllm:num_requests_running") > 0)
                self.load("second")
        else:
            expected = self._submit(job, kind, tasks, samples)
        rows = self._there.product.results(job, expected, SECONDS)
        served = [one for one in self._there.served() if one.key not in self._seen]
        self._seen |= {one.key for one in served}
        found = {(one["task_id"], one["sample_index"]): one for one in rows}
        return Played(found, served, before, self._version, self._tokenized() - tokenized)

    def load(self, name: str) -> None:
        """Pause the server, load one of the checkpoints, and resume; rollouts continue with it."""
        if name == self._loaded:
            return
        self._loaded, self._version = name, f"{name}-{next(self._numbers)}"
        request = {
            "policyVersion": self._version,
            "source": {"checkpoint": {"path": str(self._weights[name].folder)}},
            "mode": "abort",
            "inFlight": "continue",
            "reference": self._weights[name].reference,
        }
        update = self._there.product.update(POOL, request, SECONDS)
        assert (update["state"], update["verified"]) == ("Succeeded", True), update

    def _submit(self, job: str, kind: str, tasks: list[dict[str, Any]], samples: int) -> set[tuple[str, int]]:
        example = yaml.safe_load((EXAMPLE / "job.yaml").read_text())["spec"]
        spec = example | {
            "tasks": {"inline": tasks},
            "samplesPerTask": samples,
            "agent": agent(kind),
            "backendRef": {"name": POOL},
        }
        with self._there.product.http() as http:
            http.post("/v1/rolloutjobs", json=job_manifest(job, spec)).raise_for_status()
        return {(task["id"], sample) for task in tasks for sample in range(samples)}

    def _tokenized(self) -> int:
        with self._there.product.http() as http:
            lines = http.get("/metrics").raise_for_status().text.splitlines()
        rows = (line.split() for line in lines if line.startswith("rollyard_gateway_tokenized_total"))
        return sum(int(float(row[-1])) for row in rows)

    def _until(self, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not met():
            assert time.monotonic() < deadline, self._there.product.words()
            time.sleep(0.02)


@pytest.fixture(scope="module")
def vllm_lab(
    start_vllm: Callable[..., VllmServer],
    forward: Forward,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Lab]:
    arguments = ("--max-model-len", "2048", "--no-enable-prefix-caching")
    server = start_vllm(MODEL, 0, arguments=arguments, ready=False)
    folders = {"first": MODEL, "second": perturbed(MODEL, tmp_path_factory.mktemp("weights") / "second")}
    ids = list(range(40, 104))
    asked = [Pass("reference", ids, 1.0, list(range(1, len(ids))), [])]
    weights = {
        name: Weights(folder, {"promptIds": ids, "logprobs": forward.logprobs(folder, asked)[0]})
        for name, folder in folders.items()
    }
    server.wait()
    folder = tmp_path_factory.mktemp("stage")
    with recording(server.url, folder, "proxy") as proxy, a_product() as product:
        yield Lab(Stage(product, [proxy], folder, MODEL), server, weights)
    server.stop()


def faithful(played: Played) -> None:
    """Check that each turn's prompt and tokens are what the server was asked and answered, once each."""
    assert {one["status"] for one in played.trajectories.values()} == {"succeeded"}, [
        one["message"] for one in played.trajectories.values()
    ]
    verdict = judge(played.trajectories.values(), played.served)
    with invariant():
        assert verdict.findings == []
        assert verdict.unused == []
    assert verdict.turns > 0
    if all(one.get("harness") for one in played.trajectories.values()):
        # What the model has not sampled was tokenized once, whatever the number of turns.
        segments = [segment for one in played.trajectories.values() for segment in one["segments"]]
        outside = [len(one["prompt_ids"]) + one["loss_mask"].count(0) for one in segments]
        assert played.tokenized == sum(outside)


def the_same(native: Played, harness: Played) -> None:
    """Check that both have the same tokens of the same weights, and the same rewards."""
    assert native.trajectories.keys() == harness.trajectories.keys()
    for key, own in native.trajectories.items():
        other = harness.trajectories[key]
        with invariant():
            for name in ("prompt_ids", "response_ids", "loss_mask"):
                assert [one[name] for one in other["segments"]] == [one[name] for one in own["segments"]], key
        for segment, mine in zip(other["segments"], own["segments"], strict=True):
            assert segment["logprobs"] == pytest.approx(mine["logprobs"], abs=1e-4)
        assert harness.versions(other) == native.versions(own)
        assert other["reward"] == own["reward"]
        assert other["truncated_reason"] == own["truncated_reason"]
        assert (other.get("branches", []), other["harness"]["name"]) == ([], "command")


@pytest.mark.nightly
def test_it_leaves_the_ids_and_rewards_of_our_own_agent(vllm_lab: Lab) -> None:
    vllm_lab.load("first")
    native, harness = (vllm_lab.play(kind, "plain", TASKS[:4], 2) for kind in AGENTS)
    for played in (native, harness):
        faithful(played)
    the_same(native, harness)
    # The comparison would say little if no rollout had several turns, or all had one reward.
    assert max(len(one["turns"]) for one in native.trajectories.values()) > 1
    assert len({one["reward"] for one in native.trajectories.values()}) > 1


def test_new_weights_between_two_turns_come_to_both(vllm_lab: Lab) -> None:
    """The proxy holds the second turn back until the weights are new, so both agents get them there."""
    plays = []
    for kind in AGENTS:
        vllm_lab.load("first")
        plays.append(vllm_lab.play(kind, "between", LONGER, 1, update="second turn"))
        faithful(plays[-1])
    the_same(*plays)
    for played in plays:
        (one,) = played.trajectories.values()
        labels = played.versions(one)
        assert labels == sorted(labels, reverse=True)
        assert set(labels) == {"old", "new"}
        # The first turn is wholly old, and all that follows is new.
        assert labels.count("old") == one["turns"][0]["end"] - one["turns"][0]["start"]


@pytest.mark.nightly
def test_new_weights_in_the_middle_of_a_turn(vllm_lab: Lab) -> None:
    """Where the update cuts a turn is chance, so the two agents' tokens are comparable up to there only."""
    plays = []
    for kind in AGENTS:
        vllm_lab.load("first")
        plays.append(vllm_lab.play(kind, "within", LONGER, 1, update="first turn"))
        faithful(plays[-1])
    sampled = []
    for played in plays:
        (one,) = played.trajectories.values()
        labels = played.versions(one)
        assert labels == sorted(labels, reverse=True)
        turn, segment = one["turns"][0], one["segments"][0]
        own = segment["policy_versions"][turn["start"] : turn["end"]]
        assert set(own) == {played.old, played.new}, "the update came in the middle of the turn"
        assert (turn["segment"], turn["start"]) == (0, 0)
        sampled.append(segment["response_ids"][: own.count(played.old)])
    shorter = min(map(len, sampled))
    with invariant():
        assert sampled[0][:shorter] == sampled[1][:shorter]
