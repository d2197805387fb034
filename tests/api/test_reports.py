"""Reports of workers about their leases: what is accepted, and what is refused by field."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import msgpack
import pyarrow.parquet
import pytest
from rollyard_api.core.codec import MAX_KEYS, unpack
from rollyard_api.core.problems import Invalid
from rollyard_api.machine.events import RunDone
from rollyard_api.rollouts import reports
from rollyard_api.trajectories.packed import segments_of
from rollyard_crds.token_arrays import PackedSegment
from rollyard_testing.api.plane import Worker, make_manifest
from rollyard_testing.crds.segments import packed, reported


async def _refused(served: Any, worker: Any, lease: dict[str, Any], **fields: Any) -> list[str]:
    body = {"worker": "w", "results": [reported(worker.result(lease, **fields))]}
    answer = await served.worker.post("/v1/leases/complete", json=body)
    assert answer.status_code == 422, answer.text
    errors: list[str] = answer.json()["errors"]
    return errors


async def test_wrong_results_are_refused_by_field(served: Any, worker: Any) -> None:
    (init,) = await worker.lease(init=1)
    assert (
        "results[0].sandbox.node"
        in (await _refused(served, worker, init, sandbox={"provider": "p", "id": "i", "address": "a"}))[0]
    )
    assert "only the Eval stage" in (await _refused(served, worker, init, reward=1.0))[0]
    await worker.complete(worker.result(init))
    (run,) = await worker.lease(run=1)
    good = worker.result(run)["trajectory"]
    turns = [{"segment": 0, "start": 0, "end": 9, "finish_reason": "stop"}]
    assert "turns[0]" in (await _refused(served, worker, run, trajectory=good | {"turns": turns}))[0]
    assert "is required" in (await _refused(served, worker, run, trajectory=None))[0]
    assert await worker.complete(worker.result(run)) == ["accepted"]
    (evaluation,) = await worker.lease(eval=1)
    assert "finite number" in (await _refused(served, worker, evaluation, reward=None))[0]
    assert "finite number" in (await _refused(served, worker, evaluation, reward="1"))[0]
    assert (await served.counts())["succeeded"] == 0


_GOOD: dict[str, Any] = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4],
    "loss_mask": [1, 0],
    "logprobs": [-0.5, 0],
    "policy_versions": ["v1", ""],
}


def _trajectory(*segments: Any, turns: tuple[Any, ...] = (), **fields: Any) -> dict[str, Any]:
    turn = {"segment": 0, "start": 0, "end": 1, "finish_reason": "stop"}
    document = {"id": "r", "job": "job", "task_id": "t", "group_id": "t", "sample_index": 0}
    return document | {"segments": [*segments], "turns": [turn | one for one in turns]} | fields


def _ran(trajectory: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a CompleteRequest with one Run."""
    item = reported({"rollout": "r", "token": 1, "stage": "run", "trajectory": trajectory})
    return {"worker": "w", "results": [item | fields]}


@pytest.mark.parametrize(
    "trajectory",
    [
        _trajectory(),
        _trajectory(_GOOD, _GOOD),
        _trajectory(_GOOD, _GOOD, turns=({}, {"segment": 1, "start": 1, "end": 2}, {"segment": 1, "end": 0})),
        _trajectory(turns=({"end": 0, "finish_reason": "replayed"},)),
    ],
    ids=["no segments", "two segments", "turns of two segments", "a replayed turn without tokens"],
)
def test_trajectories_that_are_taken(trajectory: dict[str, Any]) -> None:
    ((rollout, event),), _ = reports.check_results(_ran(trajectory))
    assert isinstance(event, RunDone)
    assert (rollout, event.token, event.tokens_in_eval) == ("r", 1, False)
    assert event.counts.sampled_tokens == len(trajectory["segments"])
    kept = [dict(one.lists()) for one in segments_of(event.segments)]
    assert kept == trajectory["segments"], "the lists come back as they were"
    sizes = [{"prompt_tokens": 2, "response_tokens": 2, "sampled_tokens": 1}] * len(kept)
    record = {name: value for name, value in trajectory.items() if name != "segments"}
    assert json.loads(unpack(event.record)) == record | {"segment_sizes": sizes}


UNEVEN_LISTS = pytest.mark.attack(
    "runs of versions for 10¹² tokens, lists of different lengths, floats in the place of ids, a mask of "
    "other numbers",
    boundary="worker",
    surface="token lists of reports",
    stopped_by="lengths are compared before anything is unpacked; types and values are checked, and the "
    "message names the field",
)


@pytest.mark.attack(
    "log-probabilities that no sampler gives (-9999, NaN), on which a trainer would train",
    boundary="control plane",
    surface="answers of backends, records of workers",
    stopped_by="refused unless they are numbers from -1,000 to 0; the message names the token and the value",
)
@UNEVEN_LISTS
@pytest.mark.parametrize(
    ("trajectory", "problem"),
    [
        (_trajectory(_GOOD | {"loss_mask": [1]}), "loss_mask has 1 entries, response_ids has 2"),
        (_trajectory(_GOOD | {"logprobs": [-0.5]}), "results[0].segments[0]: logprobs has 1 entries"),
        (_trajectory(_GOOD | {"policy_versions": ["v1"] * 3}), "policy_versions has 3 entries"),
        (_trajectory(_GOOD | {"loss_mask": [1, 2]}), "loss_mask: every entry must be 0 or 1"),
        (_trajectory(_GOOD | {"loss_mask": [1, 256]}), "loss_mask: every entry must be 0 or 1"),
        (_trajectory(_GOOD, _GOOD | {"logprobs": [-0.5, -0.5]}), "segments[1]: logprobs: must be 0.0 where"),
        (_trajectory(_GOOD | {"logprobs": [-math.inf, 0.0]}), "must be from -1000 to 0 (got -inf)"),
        (_trajectory(_GOOD | {"logprobs": [math.nan, 0.0]}), "must be from -1000 to 0 (got nan)"),
        (
            _trajectory(_GOOD | {"loss_mask": [1, 1], "logprobs": [-0.5, math.nan]}),
            "must be from -1000 to 0 (got nan)",
        ),
        (_trajectory(_GOOD | {"logprobs": [-9999.0, 0.0]}), "must be from -1000 to 0 (got -9999.0)"),
        (_trajectory(_GOOD | {"logprobs": [0.5, 0.0]}), "must be from -1000 to 0 (got 0.5)"),
        (
            _trajectory(_GOOD, turns=({}, {"segment": 1})),
            "turns[1].segment: there is no segment 1",
        ),
        (_trajectory(_GOOD, turns=({"segment": -1},)), "trajectory.turns[0].segment"),
        (_trajectory(_GOOD, turns=({"start": 2},)), "trajectory.turns[0]: [2, 1) does not lie in segment 0"),
        (_trajectory(_GOOD, turns=({"start": -1},)), "trajectory.turns[0]"),
        (_trajectory(_GOOD, turns=({"end": 3},)), "trajectory.turns[0]: [0, 3) does not lie in segment 0"),
        (_trajectory(turns=({"end": 0},)), "trajectory.turns[0].segment: there is no segment 0"),
        (_trajectory(turns=({"end": 1, "finish_reason": "replayed"},)), "there is no segment 0"),
        (_trajectory(_GOOD, sample_index="first"), "trajectory.sample_index"),
        (_trajectory(_GOOD, status="failed"), "trajectory.status: unknown field"),
    ],
)
def test_trajectories_that_are_refused(trajectory: dict[str, Any], problem: str) -> None:
    with pytest.raises(Invalid) as refused:
        reports.check_results(_ran(trajectory))
    assert problem in refused.value.errors[0]


@UNEVEN_LISTS
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"text": "x"}, "segments[0].text: unknown field"),
        ({"policy_versions": None}, "segments[0].policy_versions: "),
        ({"policy_versions": {"runs": [["v1", 2, 3]]}}, "segments[0].policy_versions: runs[0]: must be"),
        ({"policy_versions": {"runs": [["v1", -1], ["", 3]]}}, "must be [version, number of tokens]"),
        ({"policy_versions": {"runs": [["v1", "2"]]}}, "must be [version, number of tokens]"),
        ({"policy_versions": {"runs": [["v1", 1 << 32]]}}, "policy_versions has 4294967296 entries"),
        ({"policy_versions": {"runs": [["v1", (1 << 64) - 1]]}}, "must be [version, number of tokens]"),
        ({"policy_versions": {"runs": [["v1", True], ["", 1]]}}, "policy_versions: runs[0]: must be"),
        ({"prompt_ids": [1, 2]}, "segments[0].prompt_ids: "),
        ({"prompt_ids": {"dtype": "<u2", "data": "AQ=="}}, "are not whole numbers of <u2"),
        ({"prompt_ids": {"dtype": "<u2", "data": "A Q="}}, "segments[0].prompt_ids.data: must be base64"),
        ({"prompt_ids": {"dtype": "<u2", "data": 7}}, "segments[0].prompt_ids.data: "),
        ({"prompt_ids": {"dtype": "|O", "data": "AQ=="}}, "segments[0].prompt_ids.dtype: "),
        ({"prompt_ids": {"dtype": "<f4", "data": "AAAAAA=="}}, "every entry must be an integer"),
        ({"response_ids": {"dtype": "<f4", "data": "AAAAAAAAAAA="}}, "every entry must be an integer"),
        ({"logprobs": {"dtype": "<u1", "data": "AAA="}}, "logprobs: every entry must be a float"),
        ({"loss_mask": {"dtype": "<u2", "data": "AQAAAA=="}}, "loss_mask: every entry must be 0 or 1"),
    ],
)
def test_arrays_that_are_refused(change: dict[str, Any], problem: str) -> None:
    (segment,) = packed(_GOOD)
    with pytest.raises(Invalid) as refused:
        reports.check_results(_ran(_trajectory(), segments=[segment | change]))
    assert problem in refused.value.errors[0]
    missing = {name: value for name, value in segment.items() if name not in change}
    if len(missing) < len(segment):
        with pytest.raises(Invalid, match=f"{next(iter(change))}: is missing"):
            reports.check_results(_ran(_trajectory(), segments=[missing]))


WRONG_ITEMS = pytest.mark.attack(
    "a million wrong items or unknown keys, whose description takes gigabytes and holds up everybody",
    boundary="worker",
    surface="reports of workers",
    stopped_by="a list is described by its first wrong item; objects have a bounded number of keys",
)


@WRONG_ITEMS
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"segments": [{}]}, "segments[0]"),
        ({"segments": [packed(_GOOD)[0] | {"policy_versions": {"runs": [["v", 1.5]] * 10_000}}]}, "segments"),
        ({"turns": [{}] * 10_000}, "trajectory.turns[0]"),
        ({"messages": [{}] * 10_000}, "trajectory.messages[0]"),
        (
            {"turns": _trajectory(turns=({"tool_calls": [{}] * 10_000},))["turns"]},
            "trajectory.turns[0].tool_calls[0]",
        ),
    ],
    ids=["segments", "runs", "turns", "messages", "tool calls"],
)
def test_a_list_of_wrong_items_is_described_by_the_first(change: dict[str, Any], field: str) -> None:
    """The description of a million takes gigabytes of memory, and seconds in which nobody is served."""
    body = _ran(_trajectory())
    item = body["results"][0] if "segments" in change else body["results"][0]["trajectory"]
    item |= change
    with pytest.raises(Invalid) as refused:
        reports.check_results(body)
    assert len(refused.value.errors) <= len(PackedSegment.model_fields)
    assert all(line.startswith(f"results[0].{field}") for line in refused.value.errors)


@WRONG_ITEMS
async def test_an_object_with_too_many_keys_is_refused(served: Any) -> None:
    item = _ran(_trajectory())["results"][0] | dict.fromkeys(map(str, range(MAX_KEYS + 1)), 1)
    refused = await served.worker.post("/v1/leases/complete", json={"worker": "w", "results": [item]})
    assert refused.status_code == 400
    assert f"more than {MAX_KEYS} keys" in refused.json()["detail"]


@pytest.mark.attack(
    "a worker sends numbers that break statistics, Parquet files or trainers: 1e308 seconds, NaN in "
    "msgpack, 2⁶⁴ tokens",
    boundary="worker",
    surface="times, counts and records of workers",
    stopped_by="refused by field",
)
@pytest.mark.parametrize("form", ["application/json", "application/msgpack"])
async def test_numbers_that_would_break_statistics_and_records_are_refused(
    served: Any, worker: Any, form: str
) -> None:
    (lease,) = await worker.reach("run")
    item = reported(worker.result(lease))
    sampling = {"temperature": math.nan, "top_p": 1.0, "max_tokens": 1, "seed": 1}
    turn = {"segment": 0, "start": 0, "end": 0, "finish_reason": "replayed", "model_seconds": math.inf}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"times": {"model_seconds": 1e308}}, "times.model_seconds: "),
        ({"times": {"tool_seconds": -1e308}}, "times.tool_seconds: "),
        ({"stats": {"sampled_tokens": (1 << 64) - 1}}, "stats.sampled_tokens: "),
        ({"trajectory": item["trajectory"] | {"template_breaks": 1 << 31}}, "trajectory.template_breaks: "),
    ]
    if form == "application/msgpack":
        # JSON has no such numbers, and what is stored of them would be null.
        changes += [
            ({"times": {"own_seconds": math.nan}}, "times.own_seconds: must be a finite number"),
            ({"carry": {"a": [math.inf]}}, "carry.a[0]: must be a finite number"),
            (
                {"trajectory": item["trajectory"] | {"sampling": sampling}},
                "trajectory.sampling.temperature: ",
            ),
            ({"trajectory": item["trajectory"] | {"turns": [turn]}}, "trajectory.turns[0].model_seconds: "),
        ]
    write = msgpack.packb if form == "application/msgpack" else json.dumps
    for change, problem in changes:
        body = write({"worker": worker.name, "results": [item | change]})
        refused = await worker.http.post("/v1/leases/complete", content=body, headers={"content-type": form})
        assert refused.status_code == 422, change
        assert refused.json()["errors"][0].startswith(f"results[0].{problem}")
    assert await worker.complete(worker.result(lease)) == ["accepted"]


async def test_one_wrong_report_refuses_all_of_its_request(served: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest())
    worker = Worker(served.worker)
    first, second = await worker.lease(init=2)
    good, name = worker.result(first), "results[1]"
    record = _ran(_trajectory())["results"][0]["trajectory"]
    for wrong, problem in (
        ({"rollout": 7}, f"{name}.rollout: must be a string (got 7)"),
        ({"token": True}, f"{name}.token: must be a whole number (got True)"),
        ({"token": "1"}, f"{name}.token: must be a whole number (got '1')"),
        ({"stage": "end"}, f"{name}.stage: must be 'init', 'run' or 'eval' (got 'end')"),
        ({"carry": [1]}, f"{name}.carry: must be an object"),
        ({"carry": {"k": "x" * reports.MAX_CARRY_BYTES}}, f"{name}.carry: is longer than"),
        (
            {"trajectory": record},
            f"{name}.trajectory: only the Run stage gives one",
        ),
        ({"segments": packed(_GOOD)}, f"{name}.segments: only the Run stage gives one"),
        ({"tokens_in_eval": True}, f"{name}.tokens_in_eval: only the Run stage gives one"),
        ({"reward_output": "x"}, f"{name}.reward_output: only the Eval stage gives one"),
        ({"times": {"model_seconds": "long"}}, f"{name}.times.model_seconds"),
        ({"colour": "red"}, f"{name}.colour: unknown field"),
    ):
        body = {"worker": "w", "results": [good, worker.result(second) | wrong]}
        refused = await served.worker.post("/v1/leases/complete", json=body)
        assert refused.status_code == 422, wrong
        assert refused.json()["errors"][0].startswith(problem)
    failure = {key: first[key] for key in ("rollout", "token", "stage")} | {"reason": "Broken"}
    for path, fields in (
        ("complete", {"results": []}),
        ("complete", {"results": [good] * 65}),
        ("complete", {"results": [good], "worker": ""}),
        ("complete", {"results": [good], "more": 1}),
        ("fail", {"failures": [failure] * 65}),
        ("fail", {"failures": [failure, failure | {"stage": "end"}]}),
    ):
        refused = await served.worker.post(f"/v1/leases/{path}", json={"worker": "w"} | fields)
        assert refused.status_code == 422, (path, fields)
    assert await worker.complete(good, worker.result(second)) == ["accepted"] * 2, "nothing was taken before"


@pytest.mark.attack(
    "a worker sends NaN, Infinity, 1e999 or 10⁷",
    boundary="worker",
    surface="rewards",
    stopped_by="refused by field",
)
async def test_rewards_are_finite_and_of_bounded_size(served: Any, worker: Any) -> None:
    (lease,) = await worker.reach("eval")
    wrong: dict[str, Any] = {"reward": 1.5e6, "reward_components": {"good": 1.0, "style": -2e6}}
    problems = await _refused(served, worker, lease, **wrong)
    assert [problem.partition(":")[0] for problem in problems] == [
        "results[0].reward",
        "results[0].reward_components.style",
    ]
    assert "from -1,000,000 to 1,000,000 (got 1500000.0)" in problems[0]
    # It is sent as raw text, because no library that keeps to JSON would write it.
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 400):
        for field, value in (("reward", number), ("reward_components", f'{{"style": {number}}}')):
            item = json.dumps(worker.result(lease) | {field: "HERE"}).replace('"HERE"', value)
            answer = await worker.http.post(
                "/v1/leases/complete",
                content=f'{{"worker": "{worker.name}", "results": [{item}]}}',
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 400
            name = f"results[0].{field}" + (".style" if field == "reward_components" else "")
            assert f"{name}: must be a finite number" in answer.text
    for unbounded in (math.nan, math.inf):
        body = msgpack.packb({"worker": worker.name, "results": [worker.result(lease, reward=unbounded)]})
        answer = await worker.http.post(
            "/v1/leases/complete", content=body, headers={"content-type": "application/msgpack"}
        )
        assert answer.status_code == 422
        assert "results[0].reward: must be a finite number" in answer.text
    assert "only the Eval stage" in (await _refused(served, worker, lease, stage="init", reward=None,
                                                    reward_reason="TestTimeout"))[0]  # fmt: skip
    for reason in ("test timeout", "Test\n", "x" * 200, 7):
        refused = await _refused(served, worker, lease, reward_reason=reason)
        assert refused[0].startswith("results[0].reward_reason: ")
    for output in ("x" * 4097, 7, ["x"]):
        refused = await _refused(served, worker, lease, reward_output=output)
        assert refused[0].startswith("results[0].reward_output: ")
    assert await worker.complete(worker.result(lease, reward=-1e6)) == ["accepted"]


@pytest.mark.attack(
    "Run says why Eval gave a reward",
    boundary="evaluation",
    surface="reward's reason",
    stopped_by="only Eval's own word is recorded",
)
async def test_the_reason_of_a_reward_reaches_the_record(served: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=2))
    worker = Worker(served.worker)
    runs = await worker.reach("run", 8)
    recorded = worker.result(runs[0])["trajectory"]
    for field in ("reward_reason", "reward_output"):  # Run may not set these.
        refused = await _refused(served, worker, runs[0], trajectory=recorded | {field: "ByRun"})
        assert refused[0].startswith(f"results[0].trajectory.{field}: unknown field")
    await worker.complete(*map(worker.result, runs))
    first, *rest = await worker.lease(eval=8)
    results = [
        worker.result(first, reward=0.0, reward_reason="SandboxSabotaged", reward_output="a locked folder")
    ]
    await worker.complete(*results, *[worker.result(lease) for lease in rest])
    path = "/v1/rolloutjobs/job/trajectories"
    records = [json.loads(line) for line in (await served.admin.get(path)).text.splitlines()]
    by_id = {record["id"]: record for record in records}
    assert by_id[first["rollout"]]["reward_reason"] == "SandboxSabotaged"
    assert [record.get("reward_reason") for record in records].count(None) == len(rest)
    assert by_id[first["rollout"]]["reward_output"] == "a locked folder"
    assert [record.get("reward_output") for record in records].count(None) == len(rest)
    answer = await served.admin.get(path, headers={"Accept": "application/vnd.apache.parquet"})
    table = pyarrow.parquet.read_table(io.BytesIO(answer.content)).to_pylist()
    assert sorted(row["reward_reason"] for row in table) == [""] * len(rest) + ["SandboxSabotaged"]
