"""Records of harnesses: what is taken, how it is delivered, and what is refused."""

from __future__ import annotations

import io
import json
from typing import Any

import msgpack
import pyarrow.parquet
import pytest
from rollyard_api.core.problems import Invalid
from rollyard_api.rollouts import reports
from rollyard_api.trajectories.packed import ARRAYS
from rollyard_crds.token_arrays import PackedSegment
from rollyard_crds.trajectory import (
    MAX_BRANCHES,
    MAX_HARNESS_TEXT,
    RescoredTrajectory,
    Trajectory,
    Transcript,
)
from rollyard_testing.crds.conversations import GATEWAY, OWN, TRAINED, harness_record
from rollyard_testing.crds.segments import reported

_NEW = ("conversation", "continues", "branches", "harness")


async def _played(served: Any, worker: Any, **result: Any) -> list[Any]:
    """Report a Run of each lease with the record of a harness, and return the leases of Eval."""
    leases = await worker.reach("run")
    results = []
    for lease in leases:
        own = worker.result(lease)["trajectory"]
        record = harness_record(**{name: own[name] for name in ("id", "task_id", "group_id", "sample_index")})
        results.append(worker.result(lease, trajectory=record, **result))
    assert set(await worker.complete(*results)) == {"accepted"}
    evals: list[Any] = await worker.lease(eval=8)
    return evals


async def test_the_record_of_a_harness_passes_every_way_unchanged(served: Any, worker: Any) -> None:
    sent = harness_record()
    leases = await _played(served, worker, tokens_in_eval=True)
    for lease in leases:
        assert {name: lease["trajectory"][name] for name in _NEW} == {name: sent[name] for name in _NEW}
        transcript = Transcript.model_validate(lease["trajectory"])
        segments = [PackedSegment.model_validate(one).lists() for one in lease["segments"]]
        assert transcript.with_segments(segments).branches[0].turns[0].asked == {
            "temperature": 1,
            "max_tokens": 32000,
        }
        assert transcript.sampled_tokens == 12
    await worker.complete(*(worker.result(lease, reward=0.5) for lease in leases))
    await served.until_stored()
    path = "/v1/rolloutjobs/job/trajectories"
    lines = (await served.admin.get(path)).text.splitlines()
    forms = {
        form: await served.admin.get(path, headers={"Accept": form})
        for form in ("application/msgpack", ARRAYS, "application/vnd.apache.parquet")
    }
    for line in lines:
        record = json.loads(line)
        assert {name: record[name] for name in _NEW} == {name: sent[name] for name in _NEW}
        assert record["segments"] == sent["segments"]
        model = Trajectory.model_validate(record)
        assert Trajectory.model_validate_json(model.line()) == model
        again = RescoredTrajectory.model_validate(model.model_dump() | {"reward": 0.25})
        assert Trajectory.model_validate(again.model_dump(exclude={"rescored"}) | {"reward": 0.5}) == model
        assert [i for i, one in enumerate(model.segments) if any(one.loss_mask)] == TRAINED
        one = (await served.admin.get(f"/v1/rolloutjobs/job/rollouts/{record['id']}")).json()
        assert one == record
    assert msgpack.unpackb(forms["application/msgpack"].content) == [json.loads(line) for line in lines]
    for record in msgpack.unpackb(forms[ARRAYS].content):
        assert {name: record[name] for name in _NEW} == {name: sent[name] for name in _NEW}
    table = pyarrow.parquet.read_table(io.BytesIO(forms["application/vnd.apache.parquet"].content))
    for row in table.to_pylist():
        assert (row["conversation"], row["continues"]) == (OWN, 0)
        assert (json.loads(row["branches"]), json.loads(row["harness"])) == (
            sent["branches"],
            sent["harness"],
        )
    groups = (await served.admin.get("/v1/rolloutjobs/job/groups")).text.splitlines()
    assert [t["branches"] for g in groups for t in json.loads(g)["trajectories"]] == [sent["branches"]] * len(
        lines
    )


async def test_records_of_other_agents_have_none_of_the_fields(served: Any, worker: Any) -> None:
    assert await worker.finish_all()
    path = "/v1/rolloutjobs/job/trajectories"
    for line in (await served.admin.get(path)).text.splitlines():
        assert not set(_NEW) & json.loads(line).keys()
        model = Trajectory.model_validate_json(line)
        assert not any(f'"{name}"'.encode() in model.line() for name in (*_NEW, "asked"))
        assert not set(_NEW) & model.transcript.model_dump().keys()
    answer = await served.admin.get(path, headers={"Accept": "application/vnd.apache.parquet"})
    for row in pyarrow.parquet.read_table(io.BytesIO(answer.content)).to_pylist():
        assert [row[name] for name in _NEW] == [0, None, "[]", "null"]


async def test_what_the_gateway_counted_is_in_the_metrics(served: Any, worker: Any) -> None:
    leases = await _played(served, worker, stats={"sampled_tokens": 16, "gateway": GATEWAY})
    n = len(leases)
    text = (await served.admin.get("/metrics")).text
    for name, value in (
        ('calls_total{protocol="openai-chat"}', 4),
        ('calls_total{protocol="anthropic-messages"}', 2),
        ('calls_total{protocol="other"}', 1),
        ("refused_total", 1),
        ("repeats_total", 2),
        ('conversations_total{kind="main"}', 2),
        ('conversations_total{kind="policy"}', 1),
        ("segments_total", 0),
        ("unmatched_total", 1),
        ("tokenized_total", 17),
    ):
        assert f"rollyard_gateway_{name} {float(value * n)}" in text
    assert "telepathy" not in text


async def test_words_of_branches_are_found(served: Any, worker: Any) -> None:
    leases = await _played(served, worker)
    await worker.complete(*(worker.result(lease, reward=0.5) for lease in leases))
    await served.until_stored()
    await served.plane.flush()
    for text, number in (("subtracts", len(leases)), ("summary", len(leases)), ("absent", 0)):
        asked = {"slim": True, "search": text}
        answer = await served.viewer.get("/v1/rolloutjobs/job/rollouts", params=asked)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["items"]) == number


async def test_pieces_of_branches_are_read_by_their_numbers(served: Any, worker: Any) -> None:
    leases = await _played(served, worker)
    await worker.complete(*(worker.result(lease, reward=0.5) for lease in leases))
    sent = harness_record()
    path = f"/v1/rolloutjobs/job/rollouts/{leases[0]['rollout']}"
    brief = (await served.viewer.get(f"{path}/brief")).json()
    assert (brief["messages"], brief["turns_total"], len(brief["segments"])) == (4, 1, 5)
    assert {name: brief[name] for name in ("conversation", "continues", "harness")} == {
        name: sent[name] for name in ("conversation", "continues", "harness")
    }
    for shown, branch in zip(brief["branches"], sent["branches"], strict=True):
        assert (shown["messages"], shown["turns_total"]) == (len(branch["messages"]), len(branch["turns"]))
        assert (shown["number"], shown["kind"], shown["trained"]) == (
            branch["number"],
            branch["kind"],
            branch["trained"],
        )
    assert "arguments" not in brief["branches"][0]["turns"][0]["tool_calls"][0]
    for number, branch in [(OWN, sent), *((one["number"], one) for one in sent["branches"])]:
        page = (await served.viewer.get(f"{path}/messages", params={"conversation": number})).json()
        assert [item["content"] for item in page["items"]] == [m["content"] for m in branch["messages"]]
        last = len(branch["messages"]) - 1
        assert page["items"][last]["turn"] == len(branch["turns"]) - 1
        text = await served.viewer.get(f"{path}/messages/{last}", params={"conversation": number})
        assert text.json()["text"] == branch["messages"][last]["content"]
    own = (await served.viewer.get(f"{path}/messages")).json()
    assert own["items"][-1]["content"] == "It is fixed."
    first = (await served.viewer.get(f"{path}/messages", params={"conversation": 0})).json()
    assert first["items"][2]["tool_calls"][0]["arguments"] == '{"command":"ls"}'
    for piece in ("messages", "messages/0"):
        answer = await served.viewer.get(f"{path}/{piece}", params={"conversation": 5})
        assert (answer.status_code, answer.json()["reason"]) == (404, "PieceNotFound")


_BRANCHES: list[dict[str, Any]] = harness_record()["branches"]


def _with(index: int, **changes: Any) -> dict[str, Any]:
    """Return the record with changes of one of its branches."""
    branches = [*_BRANCHES]
    branches[index] = branches[index] | changes
    return harness_record(branches=branches)


def _turned(index: int, **changes: Any) -> dict[str, Any]:
    return _with(index, turns=[_BRANCHES[index]["turns"][0] | changes])


def _ran(record: dict[str, Any]) -> dict[str, Any]:
    item = reported({"rollout": "r", "token": 1, "stage": "run", "trajectory": record})
    return {"worker": "w", "results": [item]}


def _sampled_in(segment: int) -> dict[str, Any]:
    record = harness_record()
    record["segments"][segment]["loss_mask"][1] = 1
    return record


@pytest.mark.attack(
    "a worker, or a policy that deceives the gateway, has tokens trained on that no trainer may learn from: "
    "those of the policy's own calls, or of conversations that the job leaves out",
    boundary="worker",
    surface="records of workers",
    stopped_by="refused unless loss masks of untrained conversations are 0 throughout, each segment belongs "
    "to one conversation, and no conversation of the policy itself is trained on",
)
@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (_sampled_in(2), "branches[2].turns[0].segment: the loss mask of segment 2 must be 0"),
        (_sampled_in(3), "branches[3].turns[0].segment: the loss mask of segment 3 must be 0"),
        (_with(1, trained=False), "branches[1].turns[0].segment: the loss mask of segment 1 must be 0"),
        (_with(2, trained=True), "branches[2].trained: calls that the policy made by itself are never"),
        (_turned(3, segment=4), "branches[3].turns[0].segment: segment 4 belongs to conversation 4"),
        (_turned(2, segment=1), "branches[2].turns[0].segment: segment 1 belongs to conversation 1"),
    ],
)
def test_what_must_not_be_trained_on_is_refused(record: dict[str, Any], problem: str) -> None:
    with pytest.raises(Invalid) as refused:
        reports.check_results(_ran(record))
    assert refused.value.errors[0].startswith(f"results[0].trajectory.{problem}")


@pytest.mark.attack(
    "a worker sends branches whose numbers, parents or turns lead nowhere, or in a circle",
    boundary="worker",
    surface="records of workers",
    stopped_by="refused by field",
)
@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (_turned(1, segment=5), "branches[1].turns[0].segment: there is no segment 5"),
        (_turned(1, segment=-1), "branches[1].turns[0].segment: there is no segment -1"),
        (_turned(1, end=5), "branches[1].turns[0]: [0, 5) does not lie in segment 1"),
        (_turned(1, start=3, end=2), "branches[1].turns[0]: [3, 2) does not lie in segment 1"),
        (_with(1, number=0), "branches[1].number: must be greater than 0"),
        (_with(1, number=3), "branches[2].number: must be greater than 3"),
        (_with(3, number=OWN), "branches[3].number: 4 is the number of the rollout's own"),
        (_with(1, number=-1), "branches[1].number: "),
        (_with(1, number=1 << 31), "branches[1].number: "),
        (_with(1, kind="daydream"), "branches[1].kind: "),
        (_with(1, parent=1), "branches[1].parent: must be the number of a conversation that began before 1"),
        (_with(1, parent=2), "branches[1].parent: must be the number of a conversation that began before 1"),
        (_with(3, parent=OWN), "branches[3].parent: must be the number of a conversation that began before"),
        (_with(3, number=9, parent=7), "branches[3].parent: must be the number of a conversation"),
        (_with(3, shared=6), "branches[3].shared: must be at most 5, the messages of its parent (got 6)"),
        (_with(2, shared=1), "branches[2].shared: must be at most 0"),
        (harness_record(continues=OWN), "continues: must be the number of a branch that began before 4"),
        (harness_record(conversation=7, continues=5), "continues: must be the number of a branch"),
        (harness_record(conversation=-1), "conversation: "),
        (harness_record(branches=[], turns=[]), "continues: there is no branch 0"),
        (
            harness_record(
                branches=[{"number": n, "kind": "other", "trained": False} for n in range(5, 300)]
            ),
            "branches: ",
        ),
        (harness_record(branches=[{}] * MAX_BRANCHES), "branches[0]."),
        (
            harness_record(harness={"name": "h", "exit_code": 0, "log": "x" * (MAX_HARNESS_TEXT + 1)}),
            "harness.log",
        ),
        (harness_record(harness={"name": "h", "exit_code": 1 << 64}), "harness.exit_code"),
    ],
)
def test_branches_that_lead_nowhere_are_refused(record: dict[str, Any], problem: str) -> None:
    with pytest.raises(Invalid) as refused:
        reports.check_results(_ran(record))
    assert refused.value.errors[0].startswith(f"results[0].trajectory.{problem}")
    assert len(refused.value.errors) < 8


def test_conversations_that_are_taken() -> None:
    later = _BRANCHES[3] | {"number": 7, "parent": OWN, "shared": 4}
    for record in (
        harness_record(),
        harness_record(branches=[*_BRANCHES[:3], later]),
        _with(3, parent=None, shared=0),
        _with(3, turns=[]),
        harness_record(conversation=9, continues=None),
    ):
        ((_, event),), _ = reports.check_results(_ran(record))
        assert event.counts.sampled_tokens == 12  # type: ignore[union-attr]
        assert event.counts.turns == sum(len(b["turns"]) for b in record["branches"]) + 1  # type: ignore[union-attr]


async def test_the_most_branches_are_taken_and_shown_within_bounds(served: Any, worker: Any) -> None:
    """The page gets the head of such a record in one answer, in which turns are bounded."""
    (lease, *_) = await worker.reach("run")
    record = harness_record(id=lease["rollout"])
    segment = record["segments"][1]
    turn = {"segment": 0, "start": 0, "end": 4, "finish_reason": "stop", "tool_calls": [{"name": "bash"}] * 4}
    message = {"role": "assistant", "content": "x" * 200}
    record["branches"] = [
        {
            "number": number,
            "kind": "subagent",
            "trained": True,
            "messages": [message] * 40,
            "turns": [turn | {"segment": number}] * 40,
        }
        for number in range(MAX_BRANCHES)
    ]
    record |= {"conversation": MAX_BRANCHES, "segments": [segment] * MAX_BRANCHES, "turns": []}
    assert await worker.complete(worker.result(lease, trajectory=record)) == ["accepted"]
    (evaluation,) = await worker.lease(eval=1)
    await worker.complete(worker.result(evaluation, reward=1.0))
    await served.plane.flush()
    path = f"/v1/rolloutjobs/job/rollouts/{lease['rollout']}"
    assert (await served.viewer.get(path)).json()["branches"] == record["branches"]
    brief = (await served.viewer.get(f"{path}/brief")).json()
    assert [branch["turns_total"] for branch in brief["branches"]] == [40] * MAX_BRANCHES
    assert sum(len(branch["turns"]) for branch in brief["branches"]) == 2000
