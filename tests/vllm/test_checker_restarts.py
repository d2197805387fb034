"""The checker distinguishes what a rollout had before its restart from what was lost, on written answers.

The tests beside this one run against real servers, which reach the rare cases only now and then.
"""

from __future__ import annotations

from typing import Any

import pytest
from rollyard_testing.vllm.checker import Answer, judge

FIRST = (1, 2, 3)
TOOL = (90, 91)
"""The tokens of a tool's answer between two turns."""
SEED, SECOND_SEED, OTHER_SEED = 11, 12, 21
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


class Wire:
    """Collects what one server was asked and sampled."""

    def __init__(self) -> None:
        self.served: list[Answer] = []

    def sample(
        self, prompt: tuple[int, ...], ids: list[int], version: str, seed: int = SEED, finish: str = "stop"
    ) -> Answer:
        number = len(self.served)
        answer = Answer(
            number=number, server="http://one", prompt=prompt, parameters=SAMPLING | {"seed": seed}, ids=ids,
            logprobs=[-1.0] * len(ids), versions=[version] * len(ids), finish=finish, began=number,
            ended=number + 1, delivered=True,
        )  # fmt: skip
        self.served.append(answer)
        return answer


def trajectory(*answers: Answer) -> dict[str, Any]:
    """Return a trajectory of one segment, whose turns are these answers with TOOL between them."""
    response: list[int] = []
    logprobs: list[float] = []
    versions: list[str] = []
    mask: list[int] = []
    turns = []
    for answer in answers:
        if response:
            response += TOOL
            logprobs += [0.0] * len(TOOL)
            versions += [""] * len(TOOL)
            mask += [0] * len(TOOL)
        turns.append({"segment": 0, "start": len(response), "end": len(response) + len(answer.ids)})
        response += answer.ids
        logprobs += answer.logprobs
        versions += answer.versions
        mask += [1] * len(answer.ids)
    segment = {
        "prompt_ids": list(answers[0].prompt),
        "response_ids": response,
        "logprobs": logprobs,
        "policy_versions": versions,
        "loss_mask": mask,
    }
    return {"id": "r-0", "segments": [segment], "turns": turns, "sampling": SAMPLING}


@pytest.fixture
def wire() -> Wire:
    return Wire()


def test_what_was_sampled_before_a_restart_is_explained(wire: Wire) -> None:
    cut = wire.sample(FIRST, [4, 5], "old", finish="abort")
    wire.sample((*FIRST, *cut.ids), [6], "new", SECOND_SEED)
    kept = wire.sample(FIRST, [7, 8], "new")
    verdict = judge([trajectory(kept)], wire.served, restarts=True)
    assert verdict.findings == []
    assert len(verdict.unused) == 2


def test_a_first_turn_with_new_weights_is_explained_if_the_rollout_began_again(wire: Wire) -> None:
    """The update cut the request before its first token, and its repetition was answered before the worker
    heard of the restart.
    """
    wire.sample(FIRST, [], "", finish="abort")
    early = wire.sample(FIRST, [7, 8], "new")
    wire.sample((*FIRST, *early.ids, *TOOL), [9], "new", SECOND_SEED)
    kept = wire.sample(FIRST, [7, 8], "new")
    following = wire.sample((*FIRST, *kept.ids, *TOOL), [9], "new", SECOND_SEED)
    assert judge([trajectory(kept, following)], wire.served, restarts=True).findings == []


def test_without_restarts_nothing_is_explained(wire: Wire) -> None:
    wire.sample(FIRST, [4, 5], "old")
    kept = wire.sample(FIRST, [7, 8], "new")
    assert judge([trajectory(kept)], wire.served).checks == {"unused"}


def test_another_samples_first_turn_is_not_explained_by_a_restart(wire: Wire) -> None:
    wire.sample(FIRST, [4, 5], "old")
    kept = wire.sample(FIRST, [7, 8], "new")
    lost = wire.sample(FIRST, [6, 6], "new", OTHER_SEED)
    (finding,) = judge([trajectory(kept)], wire.served, restarts=True).findings
    assert finding.check == "unused"
    assert finding.where == f"http://one request {lost.number}"


@pytest.mark.parametrize("before", [[4, 5], [7]], ids=["other tokens", "the same token"])
def test_a_lost_last_turn_of_a_restarted_rollout_is_found(wire: Wire, before: list[int]) -> None:
    wire.sample(FIRST, before, "old", finish="abort")
    kept = wire.sample(FIRST, [7, 8], "new")
    lost = wire.sample((*FIRST, 7, 8, *TOOL), [9], "new", SECOND_SEED)
    short = trajectory(kept, lost)
    short["turns"].pop()
    for name in ("response_ids", "logprobs", "policy_versions", "loss_mask"):
        short["segments"][0][name] = short["segments"][0][name][:-1]
    (finding,) = judge([short], wire.served, restarts=True).findings
    assert finding.check == "unused"
    assert finding.where == f"http://one request {lost.number}"
