"""Weights that change in the middle of generation: every token's policy version is right.

The tokens are computed again with both checkpoints: a token agrees with that of its label, and tokens of one
label do not agree with the other checkpoint.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rollyard_testing.invariants import invariant
from rollyard_testing.pace import patience
from rollyard_testing.vllm.checker import Answer, Judgement, Pass, compare, judge, passes
from rollyard_testing.vllm.checkpoints import perturbed
from rollyard_testing.vllm.forward import Forward
from rollyard_testing.vllm.servers import VllmServer
from rollyard_testing.vllm.stage import Stage, Trajectory, tasks

MakeStage = Callable[..., AbstractContextManager[Stage]]

TASKS, SAMPLES, TURNS = 4, 6, 4
SHARE = 0.25
"""The share of the time for which servers compute until the weights are new.

Dialogues then span both weights, also where an update takes its time to begin.
"""
LONG = 400
"""The tokens of a turn, of which a hot policy uses most: an update finds many in the middle."""
TEMPERATURE = 1.5
SECONDS = patience(240.0)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Two checkpoints, and what a caller sends along so that a reload can be verified."""

    folders: dict[str, Path]
    references: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def checkpoints(vllm_model: Path, forward: Forward, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folders = {"a": vllm_model, "b": perturbed(vllm_model, tmp_path_factory.mktemp("weights") / "b")}
    ids = list(range(40, 104))
    asked = [Pass("reference", ids, 1.0, list(range(1, len(ids))), [])]
    references = {
        name: {"promptIds": ids, "logprobs": forward.logprobs(folder, asked)[0]}
        for name, folder in folders.items()
    }
    return Checkpoints(folders, references)


@dataclass(frozen=True, slots=True)
class Updated:
    """A job during which a pool's weights changed."""

    trajectories: list[Trajectory]
    served: list[Answer]
    update: dict[str, Any]
    """The update as the REST API shows it at its end."""
    old: str
    new: str
    before: Path
    """The checkpoint of the old version."""
    after: Path


class Trainer:
    """A trainer that updates a pool while a job runs."""

    def __init__(self, there: Stage, servers: list[VllmServer], checkpoints: Checkpoints) -> None:
        self._there = there
        self._servers = servers
        self._checkpoints = checkpoints
        self._pool = there.pool("qwen3_coder")
        self._earlier: set[tuple[str, int]] = set()
        self._names = itertools.count(1)
        self._current = "a"
        self.version = servers[0].version()

    def play(self, mode: str, in_flight: str) -> Updated:
        """Play a job with an update in the middle of its turns, to the checkpoint that is not served now."""
        there, old, name = self._there, self.version, f"update-{next(self._names)}"
        before = self._checkpoints.folders[self._current]
        self._current = "b" if self._current == "a" else "a"
        expected = there.product.job(
            name, self._pool, tasks(name, TASKS, turns=TURNS, pause=0.2), SAMPLES,
            sampling={"temperature": TEMPERATURE, "maxTokens": LONG},
        )  # fmt: skip
        request = {
            "policyVersion": name,
            "source": {"checkpoint": {"path": str(self._checkpoints.folders[self._current])}},
            "mode": mode,
            "inFlight": in_flight,
            "reference": self._checkpoints.references[self._current],
        }
        with ExitStack() as slow:
            for server in self._servers:
                slow.enter_context(server.slowed(SHARE))
            self._until_sampling(TASKS * SAMPLES // 2)
            update = there.product.update(self._pool, request, SECONDS)
        found = there.product.results(name, expected, SECONDS)
        self.version = name
        served = [one for one in there.served() if one.key not in self._earlier]
        self._earlier |= {one.key for one in served}
        after = self._checkpoints.folders[self._current]
        return Updated(found, served, update, old, name, before, after)

    def _until_sampling(self, requests: int) -> None:
        """Wait until the servers sample so many requests at once."""
        deadline = time.monotonic() + SECONDS
        while sum(server.metric("vllm:num_requests_running") for server in self._servers) < requests:
            assert time.monotonic() < deadline, self._there.product.words()
            time.sleep(0.02)


@pytest.fixture(scope="module")
def trainer(vllm_fleet: list[VllmServer], stage: MakeStage, checkpoints: Checkpoints) -> Iterator[Trainer]:
    for server in vllm_fleet:
        server.heal()
    with stage() as there:
        there.product.worker("w0")
        yield Trainer(there, vllm_fleet, checkpoints)


def versions(trajectory: Trajectory) -> list[str]:
    """Return the versions of the sampled tokens, in order."""
    return [
        version
        for segment in trajectory["segments"]
        for version, mask in zip(segment["policy_versions"], segment["loss_mask"], strict=True)
        if mask
    ]


def right(updated: Updated, verdict: Judgement) -> None:
    """Check what holds of every update that lets rollouts continue."""
    assert updated.update["state"] == "Succeeded", updated.update
    assert updated.update["verified"], updated.update
    assert {one["status"] for one in updated.trajectories} == {"succeeded"}
    with invariant():
        # Ids, log-probabilities and versions are those that the servers gave.
        assert verdict.findings == []
    there = [versions(one) for one in updated.trajectories]
    for labels in there:
        # There are old ones, then new ones, and nothing from between, while the weights were not yet
        # verified.
        assert labels == sorted(labels, key=[updated.old, updated.new].index)
    assert any(updated.old in labels and updated.new in labels for labels in there)


def agree(forward: Forward, updated: Updated, version: str, folder: Path, other: Path) -> None:
    """Check that tokens of a version agree with its checkpoint, and not with the other one."""
    asked = list(passes(updated.trajectories, version))
    own = compare(asked, forward.logprobs(folder, asked))
    assert own.tokens > 100
    assert own.findings == []
    foreign = compare(asked, forward.logprobs(other, asked))
    assert len(foreign.findings) > foreign.tokens / 2


@pytest.mark.parametrize(
    "mode",
    [
        "abort",
        pytest.param("wait", marks=pytest.mark.nightly),
        pytest.param("keep", marks=pytest.mark.nightly),
    ],
)
def test_rollouts_go_on_with_the_new_weights(trainer: Trainer, forward: Forward, mode: str) -> None:
    updated = trainer.play(mode, "continue")
    verdict = judge(updated.trajectories, updated.served)
    right(updated, verdict)
    cut = [
        turn
        for one in updated.trajectories
        for turn in one["turns"]
        for labels in [one["segments"][turn["segment"]]["policy_versions"][turn["start"] : turn["end"]]]
        if len(set(labels)) > 1
    ]
    if mode == "wait":
        assert cut == []
    else:
        # Turns that were in the middle continued from their tokens, in one answer or in several.
        assert cut
    agree(forward, updated, updated.old, updated.before, updated.after)
    agree(forward, updated, updated.new, updated.after, updated.before)


def test_a_restarted_rollout_has_tokens_of_the_new_weights_only(trainer: Trainer, forward: Forward) -> None:
    updated = trainer.play("abort", "restart")
    assert updated.update["state"] == "Succeeded", updated.update
    assert {one["status"] for one in updated.trajectories} == {"succeeded"}
    verdict = judge(updated.trajectories, updated.served, restarts=True)
    assert verdict.findings == []
    assert verdict.unused
    # Those that had ended before have only old tokens, and none has both.
    assert all(len(set(versions(one))) == 1 for one in updated.trajectories)
    restarted = [one for one in updated.trajectories if set(versions(one)) == {updated.new}]
    assert len(restarted) >= TASKS * SAMPLES // 2
    # A restart counts as nobody's failure.
    assert {one["attempt"] for one in restarted} == {0}
    agree(forward, updated, updated.new, updated.after, updated.before)
