"""The same agent twice: a program on OpenAI's SDK through the gateway, and our own with the same seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rollyard.quickstart.run import QuickstartOptions, run
from rollyard.trajectories.reading import read_file
from rollyard_crds.trajectory import Segment, Trajectory

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/harness"
TASKS, SAMPLES = 6, 2

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap_works")]


def played(folder: Path, job: Path) -> dict[tuple[str, int], Trajectory]:
    """Return the trajectories of a job's first tasks, by task and sample."""
    out, home = folder / "out", folder / "home"
    run(QuickstartOptions(job=job, home=home, out=out, tasks=TASKS, samples=SAMPLES), Console(quiet=True))
    trajectories = list(read_file(out / "trajectories.jsonl"))
    return {(one.task_id, one.sample_index): one for one in trajectories}


def token_lists(segment: Segment) -> tuple[object, ...]:
    """Return what must be the same whoever plays."""
    return segment.prompt_ids, segment.response_ids, segment.loss_mask, segment.policy_versions


def native_job(folder: Path) -> Path:
    """Write the example's job with our own agent, which offers the same tools, and return its path."""
    job: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    limits = {name: job["spec"]["agent"][name] for name in ("maxTurns", "maxContextTokens")}
    job["spec"]["agent"] = {"type": "tools", "tools": ["bash", "submit"], **limits}
    job["spec"]["tasks"]["url"] = str(ROOT / "examples/quickstart/tasks.jsonl")
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_the_agent_of_the_example_has_at_most_60_lines() -> None:
    lines = [line for line in (EXAMPLE / "agent.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 60


def test_it_gives_the_token_ids_and_rewards_of_our_own_agent(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    native = played(tmp_path / "own", native_job(tmp_path / "own"))
    outside = played(tmp_path / "outside", EXAMPLE / "job.yaml")
    assert len(native) == TASKS * SAMPLES
    assert outside.keys() == native.keys()
    for key, trajectory in native.items():
        other = outside[key]
        assert [token_lists(one) for one in other.segments] == [
            token_lists(one) for one in trajectory.segments
        ], key
        for one, mine in zip(other.segments, trajectory.segments, strict=True):
            assert one.logprobs == pytest.approx(mine.logprobs, abs=1e-4)
        assert other.reward == trajectory.reward, key
        assert (other.answer, other.final_text) == (trajectory.answer, trajectory.final_text), key
        made = [[(each.name, each.arguments) for each in turn.tool_calls] for turn in trajectory.turns]
        assert [[(each.name, each.arguments) for each in turn.tool_calls] for turn in other.turns] == made, (
            key
        )
        # The model is not asked again after `submit`, so the gateway does not see the last result.
        messages = [(each.role, each.content) for each in trajectory.messages]
        assert [(each.role, each.content) for each in other.messages] in (messages, messages[:-1]), key
        for name in ("truncated_reason", "tool_parser", "template_breaks", "branches"):
            assert getattr(other, name) == getattr(trajectory, name)
        ends = [turn.finish_reason for turn in trajectory.turns]
        assert [turn.finish_reason for turn in other.turns] == ends
        assert other.harness is not None
    # The comparison would say little if no trajectory had several turns, or all had one reward.
    assert max(len(one.turns) for one in native.values()) > 1
    assert len({one.reward for one in native.values()}) > 1
