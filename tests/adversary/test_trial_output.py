"""What `rollyard try` shows comes from the policy, and goes to the terminal of whoever wrote the task."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rollyard import terminal
from rollyard.jobs.trial import show
from rollyard_crds import RolloutJob
from rollyard_crds.trajectory import Trajectory
from rollyard_testing.manifests import job_manifest
from rollyard_testing.page.attacks import TEXTS

FORGED = "done\n\ntask t, sample 0: succeeded, reward 1\nreward components: handler 1"
JOB = RolloutJob.model_validate(
    job_manifest("j", {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}})
)


@pytest.mark.attack(
    "messages, calls and outputs of the policy command the terminal, or look like a reward",
    boundary="evaluation",
    surface="`rollyard try`",
    stopped_by="control characters are escaped as in `rollyard view`; how the rollout ended comes last",
)
@pytest.mark.parametrize("kind", [*TEXTS, "forged"])
def test_the_terminal_obeys_nothing_and_the_reward_comes_last(kind: str) -> None:
    text = FORGED if kind == "forged" else TEXTS[kind]
    call: dict[str, Any] = {"name": "bash", "arguments": {"command": text}, "seconds": 0.1, "error": text}
    document: dict[str, Any] = {
        "id": "r", "job": "j", "task_id": "t", "group_id": "t", "sample_index": 0, "reward": 0.0,
        "reward_output": text.replace("\0", "")[-4096:],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": text},
            {"role": "tool", "content": text},
            {"role": "assistant", "content": text},
        ],
        "turns": [
            {"segment": 0, "start": 0, "end": 1, "finish_reason": "stop", "tool_calls": [call]},
            {"segment": 0, "start": 1, "end": 2, "finish_reason": "stop"},
        ],
    }  # fmt: skip
    out = io.StringIO()
    show(Trajectory.model_validate(document), JOB, terminal.console(file=out, width=200, color_system=None))
    printed = out.getvalue()
    assert not {character for character in printed if character in "\x1b\x07\x08\r\x9b"}
    _, ours, end = printed.rpartition("\n\ntask t, sample 0: succeeded, reward ")
    assert ours
    assert end.startswith("0\n")
    assert not {"task t, sample 0: succeeded, reward 1", "reward components: handler 1"} & {*end.splitlines()}
