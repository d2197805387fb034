"""What a weight update decides from the tables and from folders alone, without a server."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.core.problems import Conflict, Invalid
from rollyard_api.storage.rows import BackendRow, PoolRow, WeightUpdateRow
from rollyard_api.storage.schema import pools as pools_table
from rollyard_api.weights import checkpoints, records
from rollyard_api.weights.checkpoints import Forward
from rollyard_api.weights.steps import (
    BEHIND,
    LAST,
    PAUSED,
    BackendTarget,
    Observation,
    WeightStep,
    following,
    lacking,
    need,
)
from rollyard_api.weights.updates import BackendProgress, EarlierLogprobs, encoded, serves
from rollyard_api.weights.verification import Comparison, Reference, Unverifiable, compare, fixed_prompt
from rollyard_crds.weights import WeightSource, WeightUpdateRequest
from rollyard_testing.api.weights import FULL, NEXT, ONE, PUSHED, TWO, Pools

ONE_AGAIN: dict[str, Any] = {"lora": {"name": ONE["lora"]["name"], "path": "/adapters/one-again"}}


def updates(*sources: dict[str, Any]) -> list[WeightUpdateRow]:
    """Return the updates v1, v2, ... to these weights, the newest first."""
    rows = []
    for number, source in enumerate(sources, 1):
        asked = WeightUpdateRequest.model_validate({"policyVersion": f"v{number}", "source": source})
        request = asked.model_dump_json(by_alias=True).encode()
        rows.append(
            WeightUpdateRow(
                *(number, 1, f"v{number}", number, request, "Succeeded"),
                *(False, "", "", b"[]", None, None, 0.0, None),
            )
        )
    return rows[::-1]


@pytest.mark.parametrize(
    ("sources", "label", "begun", "loaded", "lost"),
    [
        ((FULL, NEXT), None, True, [NEXT], ""),
        ((FULL, ONE, TWO), None, True, [FULL, ONE, TWO], ""),
        ((FULL, ONE, TWO), "v1", True, [ONE, TWO], ""),
        ((FULL, ONE, TWO), "v2", True, [TWO], ""),
        # Its own label proves nothing about a server on which the update is repeated.
        ((FULL, ONE, TWO), "v3", False, [FULL, ONE, TWO], ""),
        ((ONE, NEXT, TWO), "default", True, [NEXT, TWO], ""),
        ((ONE, TWO), "default", True, [ONE, TWO], ""),
        # An adapter takes the place of those of its name, whose folders the trainer may have removed.
        ((FULL, ONE, ONE_AGAIN), None, True, [FULL, ONE_AGAIN], ""),
        ((ONE, TWO, ONE_AGAIN), "default", False, [TWO, ONE_AGAIN], ""),
        ((ONE, ONE_AGAIN), "v1", True, [ONE_AGAIN], ""),
        ((FULL, PUSHED), None, True, [], ""),
        ((FULL, PUSHED), "v1", False, [], "v2"),
        ((PUSHED, ONE), None, True, [], "v1"),
        ((PUSHED, ONE), "v1", True, [ONE], ""),
        ((PUSHED, FULL, ONE), None, False, [FULL, ONE], ""),
        ((PUSHED, PUSHED), None, True, [], ""),
    ],
)
def test_what_a_server_loads(
    sources: Sequence[dict[str, Any]], label: str | None, begun: bool, loaded: list[dict[str, Any]], lost: str
) -> None:
    row, *chain = updates(*sources)
    url = BACKEND.url
    running = replace(row, state="Running", progress=encoded({url: BackendProgress(url=url)}))
    target = BackendTarget(POOL, BACKEND, running if begun else row, tuple(chain))
    found, problem = lacking(target, Observation(label=label))
    assert list(found) == [WeightSource.model_validate(source) for source in loaded]
    assert (f"{lost!r} were pushed by the trainer" in problem) if lost else not problem


@pytest.mark.parametrize(
    ("sources", "name"),
    [
        ((), None),
        ((FULL,), None),
        ((FULL, ONE), "one"),
        ((ONE, TWO), "two"),
        ((ONE, FULL), None),
        ((FULL, ONE, PUSHED), "one"),
        ((PUSHED,), None),
    ],
)
def test_the_name_under_which_weights_are_served(sources: Sequence[dict[str, Any]], name: str | None) -> None:
    assert serves(updates(*sources)) == name


POOL = PoolRow(1, "", "default", "p", 1, b"{}", b"{}", b"{}", "m", "m", 8, True, 0.0, None, None, "v2", 2)
VERIFIED = Observation(last=WeightStep.VERIFY, comparison=Comparison(0.0, 1, 0.1, "reference"))
"""What is known of a server that gives what the reference says."""
BACKEND = BackendRow(
    *(1, "http://a", 0, True, "v2", "", "Current", "", 2, False),
    *(None, None, None, None, None, None, None, None),
)


@pytest.mark.parametrize(
    ("pool", "backend", "expected"),
    [
        ({}, {}, "look"),
        ({}, {"weights": "Updating"}, "resume"),
        ({"paused": True}, {}, "pause"),
        ({"paused": True}, {"weights": "Updating"}, "pause"),
        ({"paused": True}, {"weights": "Updating", "weights_message": PAUSED}, "hold"),
        ({"paused": True}, {"weights_message": PAUSED}, "pause"),
        ({}, {"policy_index": 1}, "bring"),
        ({}, {"policy_index": 1, "ready": False}, "stale"),
        ({}, {"policy_index": 1, "ready": False, "weights": "Updating"}, "bring"),
        ({}, {"policy_index": 2, "ready": False, "weights": "Stale"}, "stale"),
        ({}, {"policy_index": 2, "ready": False, "weights": "Failed"}, "bring"),
        ({"paused": True}, {"policy_index": 1}, "bring"),
        ({}, {"weights": "Failed", "restart_requested": True}, "watch"),
        # Other weights are wanted since the restart was asked for: they may be the ones that it loads.
        ({}, {"weights": "Failed", "restart_requested": True, "policy_index": 1}, "bring"),
        ({}, {"restart_requested": True}, "look"),
    ],
)
def test_what_a_backend_needs(pool: dict[str, Any], backend: dict[str, Any], expected: str) -> None:
    assert need(replace(POOL, **pool), replace(BACKEND, **backend)) == expected


LOADED = "look refer measure begin pause load label flush resume"
REFERENCE = Reference((1, 2), (-1.0,), 0.1, "reference")
REFERS, CANNOT = {WeightStep.REFER: {"reference": REFERENCE}}, {WeightStep.REFER: {"problem": "no reference"}}
AGREES, DIFFERS = (
    REFERS | {WeightStep.VERIFY: {"comparison": Comparison(by, 1, 0.1, "reference")}} for by in (0.0, 0.3)
)
SILENT = REFERS | {WeightStep.VERIFY: {"problem": "no such call"}}
FIRST = {"update": None, "row": replace(BACKEND, policy_index=BEHIND)}
KNOWN = {"reference": REFERENCE, "folder": "/first"}
FAILED = replace(BACKEND, weights="Failed", policy_index=BEHIND)


@pytest.mark.parametrize(
    ("fields", "request_fields", "shows", "path", "reason"),
    [
        ({}, {}, AGREES, f"{LOADED} verify accept", ""),
        ({}, {}, CANNOT, f"{LOADED} accept", "not verified: no reference"),
        # What an interrupted step has left of the label says nothing, so a server need not tell it.
        ({"row": replace(BACKEND, weights="Updating")}, {}, AGREES, f"{LOADED[5:]} verify accept", ""),
        ({}, {}, SILENT, f"{LOADED} verify accept", "not verified: no such call"),
        ({}, {}, DIFFERS, f"{LOADED} verify refuse", "differ by up to 0.3 nats"),
        # A proof is required, which a restart of the server would not give.
        ({}, {"requireVerified": True}, CANNOT, "look refer refuse", "cannot be verified: no reference"),
        ({}, {"requireVerified": True}, SILENT, f"{LOADED} verify refuse", "no such call"),
        ({"state": "Succeeded"}, {"requireVerified": True}, CANNOT, "look refer wait", "cannot be verified"),
        # The update ended, so a server that differs is at fault.
        ({"state": "Succeeded"}, {}, DIFFERS, f"{LOADED} verify give up", "differ by"),
        # The server may hold refused weights.
        ({"row": FAILED}, {}, CANNOT, "refer give up", "what it had before cannot be verified"),
        ({"row": FAILED, "state": "Succeeded"}, {}, SILENT, f"{LOADED[5:]} verify give up", "no such call"),
        # It was to be restarted, and says whether it was.
        (
            {"row": replace(BACKEND, weights="Failed")},
            {},
            {WeightStep.LOOK: {"label": "unverified:refused"}},
            "look give up",
            "it was not restarted",
        ),
        (
            {"row": replace(BACKEND, weights="Stale"), "state": "Succeeded"},
            {},
            {WeightStep.LOOK: {"label": "v2"}},
            "look keep",
            "",
        ),
        ({"state": "Succeeded"}, {"source": PUSHED}, {}, "look wait", "push them again"),
        # The weights that the server was started with.
        ({"update": None}, {}, {WeightStep.LOOK: {"label": "default"}}, "look keep", ""),
        (FIRST, {}, AGREES | {WeightStep.REFER: KNOWN}, f"{LOADED} verify accept", ""),
        (
            FIRST,
            {},
            DIFFERS | {WeightStep.REFER: KNOWN},
            f"{LOADED} verify give up",
            "is wrong too: log-prob",
        ),
        (
            FIRST,
            {},
            SILENT | {WeightStep.REFER: KNOWN},
            f"{LOADED} verify give up",
            "is wrong too: no such call",
        ),
        (FIRST, {}, REFERS, "look refer give up", "does not say which folder it was started on"),
        (
            FIRST,
            {},
            {WeightStep.REFER: {"folder": "/first", "problem": "no transformers"}},
            "look refer give up",
            "its weights are not known; what it had before cannot be verified: no transformers",
        ),
        (
            FIRST,
            {},
            {WeightStep.REFER: KNOWN, WeightStep.LOAD: {"problem": "disk"}},
            f"{LOADED.partition(' label')[0]} give up",
            "it does not load what it had before: disk",
        ),
    ],
)
def test_the_steps_of_a_backend(
    fields: dict[str, Any],
    request_fields: dict[str, Any],
    shows: dict[WeightStep, Any],
    path: str,
    reason: str,
) -> None:
    body = {"policyVersion": "v2", "source": FULL, **request_fields}
    request = WeightUpdateRequest.model_validate(body).model_dump_json(by_alias=True).encode()
    update = replace(updates(FULL, FULL)[0], request=request, state=fields.get("state", "Running"))
    target = BackendTarget(
        POOL, fields.get("row", replace(BACKEND, policy_index=1)), fields.get("update", update), ()
    )
    seen, steps, why = Observation(), [], ""
    while seen.last is None or seen.last not in LAST:
        step, why = following(target, seen)
        seen = replace(seen, last=step, **shows.get(step, {}))
        steps.append(step)
    assert " ".join(steps) == path
    assert (reason in why) if reason else not why


@pytest.mark.parametrize(
    ("measured", "difference", "place", "agrees"),
    [
        ((-1.0, -2.0, -3.0), 0.0, 1, True),
        ((-1.25, -2.0, -3.0), 0.25, 1, True),
        ((-1.0, -1.5, -3.25), 0.5, 2, False),
        ((-1.0, -2.25, -4.0), 1.0, 3, False),
        ((-1.0, math.nan, -9.0), math.inf, 2, False),
        ((-1.0, -2.0, -math.inf), math.inf, 3, False),
    ],
)
def test_the_largest_difference_decides(
    measured: tuple[float, ...], difference: float, place: int, agrees: bool
) -> None:
    found = compare(Reference((1, 2, 3, 4), (-1.0, -2.0, -3.0), 0.25, "reference"), measured)
    assert (found.max_difference, found.position, found.agrees) == (difference, place, agrees)


def test_a_fixed_prompt_fits_the_vocabulary_and_the_context() -> None:
    for vocabulary, room, length in ((256, 4096, 48), (50_000, 48, 48), (7, 12, 12), (256, 1, 2)):
        ids = fixed_prompt(vocabulary, room)
        assert len(ids) == length
        assert all(0 <= one < vocabulary for one in ids)
        assert ids == fixed_prompt(vocabulary, room)
    assert max(fixed_prompt(50_000)) > 40_000, "spread over the vocabulary"


def safetensors(file: Path, *sizes: int, metadata: bool = False) -> None:
    """Write a file with tensors of these numbers of bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if metadata else {}
    end = 0
    # The first tensor of the header need not be the first of the file.
    for number, size in enumerate(sizes):
        header = {f"t{number}": {"data_offsets": [end, end + size]}} | header
        end += size
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(end))


def refusal(source: dict[str, Any], engine: str) -> str:
    try:
        assert checkpoints.check(WeightSource.model_validate(source), ["http://127.0.0.1:1"], engine) == ""
    except Invalid as error:
        return error.detail
    return ""


def test_an_adapter_has_its_two_files(tmp_path: Path) -> None:
    source = {"lora": {"name": "one", "path": str(tmp_path)}}
    assert "source.lora.path: " in refusal(source, "vllm")
    assert "has no adapter_config.json" in refusal(source, "vllm")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "has no adapter_model.safetensors" in refusal(source, "vllm")
    weights = tmp_path / "adapter_model.safetensors"
    safetensors(weights, 64, 32, 16, metadata=True)
    assert refusal(source, "vllm") == refusal(source, "external") == ""
    assert "loads no adapters" in refusal(source, "embedded")
    whole = weights.read_bytes()
    for wrong in (whole[:-1], whole + b"x"):
        weights.write_bytes(wrong)
        assert "it was not written to the end" in refusal(source, "vllm")
    for wrong in (b"", whole[:20]):
        weights.write_bytes(wrong)
        assert "adapter_model.safetensors is" in refusal(source, "vllm")


def test_a_folder_of_the_embedded_engine_has_what_its_config_names(tmp_path: Path) -> None:
    source = {"checkpoint": {"path": str(tmp_path)}}
    assert "has no genai_config.json" in refusal(source, "embedded")
    config = tmp_path / "genai_config.json"
    config.write_text("{}")
    for engine in ("embedded", "external"):
        assert "names no model.decoder.filename" in refusal(source, engine)
    assert "has no config.json" in refusal(source, "vllm"), "vLLM cannot load it"
    config.write_text(json.dumps({"model": {"decoder": {"filename": "net.onnx"}}}))
    assert "has no net.onnx" in refusal(source, "embedded")
    (tmp_path / "net.onnx").touch()
    assert refusal(source, "embedded") == refusal(source, "external") == ""


def test_every_shard_of_a_checkpoint_is_looked_at(tmp_path: Path) -> None:
    source = {"checkpoint": {"path": str(tmp_path)}}
    (tmp_path / "config.json").write_text("{}")
    assert "has no model.safetensors" in refusal(source, "vllm")
    names = [f"model-{number}.safetensors" for number in range(3)]
    for index in (False, True):
        if index:
            weight_map = {f"t{i}": name for i, name in enumerate([*names, *names])}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for name in names:
            safetensors(tmp_path / name, 64)
        assert refusal(source, "vllm") == ""
        for name in names:
            (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
            assert f"{name} has" in refusal(source, "vllm")
            safetensors(tmp_path / name, 64)
    assert "must be an absolute path" in refusal({"checkpoint": {"path": "full"}}, "vllm")
    assert "is a file" in refusal({"checkpoint": {"path": str(tmp_path / names[0])}}, "vllm")


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[[str], str]:
    """Return a writer of programs that stand in for a Python with transformers, and log each call."""

    def write(answers: str) -> str:
        file = tmp_path / "python"
        file.write_text(f'#!/bin/sh\necho "$2" >> {tmp_path}/calls\ncat > {tmp_path}/asked\n{answers}\n')
        file.chmod(0o755)
        return str(file)

    return write


def model(folder: Path, **config: Any) -> Path:
    """Make a folder that transformers could read."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors(folder / "model.safetensors", 64)
    return folder


async def test_a_forward_pass_is_made_once_for_a_folder_until_it_changes(
    tmp_path: Path, disk: Bulkhead, interpreter: Callable[[str], str]
) -> None:
    logprobs = [-0.5] * 9
    python = interpreter(f"echo loading; echo '{json.dumps({'logprobs': logprobs})}'")
    forward, calls = Forward(python, disk), tmp_path / "calls"
    one = model(tmp_path / "one", vocab_size=300, max_position_embeddings=11)
    two = model(tmp_path / "two", text_config={"vocab_size": 500, "max_position_embeddings": 11})
    found = [await forward.reference(folder, 0.1) for folder in (one, two, one)]
    assert (
        found[0] == found[2] == Reference(tuple(fixed_prompt(300, 10)), tuple(logprobs), 0.1, "transformers")
    )
    assert found[1].ids == tuple(fixed_prompt(500, 10))
    assert json.loads((tmp_path / "asked").read_bytes()) == {"ids": list(found[1].ids)}
    assert (await forward.reference(one, 0.5)).tolerance == 0.5
    assert calls.read_text().splitlines() == [str(one), str(two)]
    # Other weights of the same size were written into the same folder.
    os.utime(one / "model.safetensors", (1.0, 1.0))
    await forward.reference(one, 0.1)
    assert calls.read_text().splitlines() == [str(one), str(two), str(one)]


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ("echo first >&2; echo out of memory >&2; exit 1", "failed: out of memory"),
        ("echo '{\"logprobs\": [-1.0, -1.0]}'", "failed"),
        ("echo '{\"logprobs\": [-1.0]}'; exit 1", "failed"),
        ("echo hello", "gave no log-probabilities"),
        ("true", "gave no log-probabilities"),
    ],
)
async def test_a_forward_pass_that_fails_is_made_again(
    answers: str, says: str, tmp_path: Path, disk: Bulkhead, interpreter: Callable[[str], str]
) -> None:
    forward, folder = (
        Forward(interpreter(answers), disk),
        model(tmp_path / "one", vocab_size=300, max_position_embeddings=3),
    )
    with pytest.raises(Unverifiable, match=says):
        await forward.reference(folder, 0.1)
    interpreter("echo '{\"logprobs\": [-1.0]}'")
    assert (await forward.reference(folder, 0.1)).logprobs == (-1.0,)


async def test_what_no_forward_pass_can_be_made_of(
    tmp_path: Path, disk: Bulkhead, interpreter: Callable[[str], str]
) -> None:
    folder = model(tmp_path / "one")
    with pytest.raises(Unverifiable, match="no Python with transformers is known"):
        await Forward("", disk).reference(folder, 0.1)
    (folder / "config.json").write_text('{"vocab_size": 300}')
    with pytest.raises(Unverifiable, match="cannot be run"):
        await Forward(str(tmp_path / "nowhere"), disk).reference(folder, 0.1)
    forward = Forward(interpreter("exit 1"), disk)
    (folder / "config.json").write_text("{}")
    with pytest.raises(Unverifiable, match="has no vocab_size"):
        await forward.reference(folder, 0.1)
    (folder / "model.safetensors").unlink()
    with pytest.raises(Unverifiable, match="is not a Hugging Face folder"):
        await forward.reference(folder, 0.1)
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"weights": "Current"}, "Succeeded"),
        # It is being resumed, or was paused since.
        ({"weights": "Updating"}, "Succeeded"),
        ({"weights": "Stale"}, "Running"),
        ({"weights": "Failed"}, "Running"),
        ({"policy_index": 0}, "Running"),
        ({"policy_index": 0, "ready": False}, "Running"),
        ({"policy_index": 0, "weights": "Stale", "draining": True}, "Succeeded"),
    ],
)
async def test_an_update_ends_once_all_that_stay_have_its_weights(
    changes: dict[str, Any], state: str, two: Pools
) -> None:
    number = await two.begin("v1", FULL)
    other = await two.begin("v1", FULL, "q")
    for url in two.urls:
        await two.set("p", url, policy_index=1, policy_version="v1")
        await two.step(number, url, step="Done", verified=True)
    await two.set("p", two.urls[2], **changes)
    await two.settle()
    found = await two.update(number)
    stay = [url for url in two.urls if url != two.urls[2] or not changes.get("draining")]
    assert found["state"] == state
    assert (found["finishedAt"] is not None) == found["verified"] == (state == "Succeeded")
    assert [part["url"] for part in found["backends"]] == stay
    assert (await two.update(other, "q"))["state"] == "Running"


async def test_an_update_is_verified_if_every_server_is(two: Pools) -> None:
    number = await two.begin("v1", PUSHED)
    for url in two.urls:
        await two.set("p", url, policy_index=1, policy_version="v1")
        await two.step(number, url, step="Done", verified=True)
    await two.step(number, two.urls[1], verified=False, message="not verified: no reference")
    await two.settle()
    found = await two.update(number)
    assert (found["state"], found["verified"], found["verifiedBy"]) == ("Succeeded", False, "")
    assert found["message"] == "not verified: no reference"


@pytest.mark.parametrize(
    ("steps", "refused", "failed"),
    [
        (("Pending", "Pausing", "Loading", "Verifying", "Done"), 2, [3, 4]),
        # One is loading while another one is found to be wrong.
        (("Loading", "Pausing", "Failed", "Verifying", "Done"), 3, [0, 2, 4]),
    ],
)
async def test_a_refused_update_is_taken_back_from_those_that_may_have_it(
    steps: tuple[str, ...], refused: int, failed: list[int], two: Pools
) -> None:
    await two.succeed(await two.begin("v1", FULL))
    await two.succeed(await two.begin("v2", ONE))
    other = await two.begin("v3", FULL, "q")
    number = await two.begin("v3", NEXT)
    for url, step in zip(two.urls, steps, strict=True):
        await two.step(number, url, step=step)
        await two.set("p", url, weights="Updating", restart_requested=True)
        await two.set("q", url, weights="Updating", restart_requested=True)
    await two.refuse(number, two.urls[refused], keeps=True)
    assert (await two.update(other, "q"))["state"] == "Running", "it is no update of this pool"
    status = await two.status()
    assert [at for at, b in enumerate(status["backends"]) if b["weights"] == "Failed"] == failed
    assert {b["weights"] for b in status["backends"]} == {"Updating", "Failed"}
    assert [at for at, b in enumerate(status["backends"]) if not b["restartRequested"]] == failed
    indices = [(await two.target(url)).row.policy_index for url in two.urls]
    assert [at for at, index in enumerate(indices) if index == BEHIND] == failed
    needed = [(await two.target(two.urls[at])) for at in failed]
    assert {need(one.pool, one.row) for one in needed} == {"bring"}, "they load the earlier weights again"
    assert {b["weights"] for b in (await two.status("q"))["backends"]} == {"Updating"}
    found = await two.update(number)
    assert (found["state"], found["message"]) == ("Failed", "wrong")
    ends = [(step, "") for step in steps]
    ends[refused] = ("Failed", "wrong")
    assert [(part["step"], part["message"]) for part in found["backends"]] == ends
    assert status["policyVersion"] == "v2"
    served = sa.select(pools_table.c.policy_index, pools_table.c.served_model).order_by(pools_table.c.id)
    rows = await two.served.plane.database.read(lambda conn: [tuple(row) for row in conn.execute(served)])
    assert rows[0] == (2, "one"), "the adapter's name is asked for again"
    later = await two.begin("v4", NEXT)
    assert await two.index(later) == 4, "the index of the refused weights means nothing else"
    assert (await two.update(number))["state"] == "Failed"


async def test_weights_of_a_superseded_update_do_not_pass_for_those_before_it(two: Pools) -> None:
    await two.succeed(await two.begin("v1", FULL))
    loading = await two.begin("v2", NEXT)
    first, second, third, *_ = two.urls
    for url, step, weights in (
        (first, "Loading", "Updating"),
        (second, "Pausing", "Updating"),
        (third, "Done", "Current"),
    ):
        await two.step(loading, url, step=step)
        await two.set("p", url, weights=weights)
    await two.refuse(await two.begin("v3", FULL))
    assert (await two.status())["policyVersion"] == "v1"
    found = [(await two.target(url)) for url in (first, second, third)]
    assert [need(one.pool, one.row) for one in found] == ["bring", "resume", "look"]
    assert found[0].restored, "it is loaded and verified before it is used"


@pytest.mark.parametrize("by", [0, 1])
async def test_weights_of_an_earlier_attempt_do_not_pass_for_those_before_it(by: int, two: Pools) -> None:
    """The server, or another one, refuses the weights after its first load was interrupted."""
    await two.succeed(await two.begin("v1", FULL))
    number = await two.begin("v2", NEXT)
    url = two.urls[0]
    await two.record(records.begin, await two.target(url), observation=Observation())
    await two.record(records.advance, await two.target(url), step="Loading")
    await two.record(records.begin, await two.target(url), observation=Observation())
    await two.refuse(number, two.urls[by], keeps=True)
    target = await two.target(url)
    assert target.update is not None
    assert (target.update.policy_version, target.need) == ("v1", "bring"), "it is not resumed as it is"
    assert following(target, Observation())[0] is WeightStep.REFER, "its label says nothing"


async def test_weights_of_a_superseded_update_do_not_pass_for_the_first_ones(two: Pools) -> None:
    number = await two.begin("v1", FULL)
    for url in two.urls[:2]:
        target = await two.target(url)
        await two.record(records.begin, target, observation=Observation())
        await two.record(records.done, target, observation=VERIFIED)
    number = await two.begin("v2", NEXT)
    await two.refuse(number, two.urls[1], keeps=True)
    status = await two.status()
    assert status["policyVersion"] == ""
    assert [b["weights"] for b in status["backends"]] == ["Failed"] * 2 + ["Current"] * 3
    for url in two.urls[:2]:
        target = await two.target(url)
        assert (target.need, target.row.policy_index) == ("bring", BEHIND)
        found = Observation(last=WeightStep.LOOK, label="v1")
        assert following(target, found)[0] is WeightStep.REFER, "it is not kept as it is"


async def test_a_later_update_supersedes_what_runs_in_its_own_pool(two: Pools) -> None:
    done = await two.begin("v1", FULL)
    await two.succeed(done)
    other = await two.begin("v1", FULL, "q")
    first = await two.begin("v2", NEXT)
    second = await two.begin("v3", FULL)
    states = [(await two.update(number))["state"] for number in (done, first, second)]
    assert states == ["Succeeded", "Superseded", "Running"]
    assert (await two.update(other, "q"))["state"] == "Running"
    assert [part["url"] for part in (await two.update(second))["backends"]] == two.urls
    assert (await two.served.admin.get(f"/v1/backendpools/q/weights/{first}")).status_code == 404
    listed = (await two.served.admin.get("/v1/backendpools/p/weights")).json()["items"]
    assert [item["id"] for item in listed] == [second, first, done]


async def test_a_version_names_the_same_weights_for_ever_unless_they_were_refused(two: Pools) -> None:
    number = await two.begin("v1", FULL)
    await two.refuse(number)
    number = await two.begin("v1", NEXT)
    await two.succeed(number)
    await two.begin("v2", FULL)
    clash = await two.post("v1", FULL)
    assert (clash.status_code, clash.json()["reason"]) == (409, "PolicyVersionExists")
    # Back to the earlier weights, which is an update of its own.
    assert await two.begin("v1", NEXT) != number
    assert (await two.post("v1", FULL, "q")).status_code == 202, "another pool has versions of its own"


async def test_another_model_name_needs_rollouts_to_restart(two: Pools) -> None:
    async def add(version: str, source: dict[str, Any]) -> str:
        asked = WeightUpdateRequest.model_validate({"policyVersion": version, "source": source})
        adding = partial(records.add, namespace="default", name="p", request=asked, note="")
        try:
            await two.served.plane.database.write(adding)
        except Conflict as error:
            return error.reason
        return ""

    assert [await add("v1", FULL), await add("v2", ONE)] == ["", "ModelNameChanges"]
    await two.begin("v2", ONE)
    told = [await add(*one) for one in (("v3", ONE), ("v4", PUSHED), ("v5", TWO), ("v6", FULL))]
    assert told == ["", "", "ModelNameChanges", "ModelNameChanges"]


async def test_pushed_weights_are_brought_again_only_to_those_that_lost_them(two: Pools) -> None:
    number = await two.begin("v1", PUSHED)
    await two.succeed(number)
    again = await two.post("v1", PUSHED)
    assert (again.status_code, again.json()["state"]) == (200, "Succeeded")
    await two.set("q", two.urls[0], weights="Stale")
    assert (await two.post("v1", PUSHED)).json()["state"] == "Succeeded"
    for url, weights in zip(two.urls, ("Current", "Stale", "Failed", "Updating", "Current"), strict=True):
        await two.set("p", url, weights=weights)
    again = await two.post("v1", PUSHED)
    assert (again.json()["id"], again.json()["state"], again.json()["finishedAt"]) == (
        number,
        "Running",
        None,
    )
    parts = [(part["step"], part["verified"]) for part in again.json()["backends"]]
    done, pending = ("Done", True), ("Pending", False)
    assert parts == [done, pending, pending, done, done]


async def test_what_a_server_gave_earlier_is_that_of_the_same_weights(two: Pools) -> None:
    """The newest measurement of the same server, in the same pool, with the weights of the same index."""

    def measured(index: int, label: str) -> EarlierLogprobs:
        return EarlierLogprobs(policy_index=index, label=label, prompt_ids=(1, 2), logprobs=(-1.0,))

    a, b, c, *_ = two.urls
    for number, (version, seen) in enumerate(
        (
            ("v1", {a: measured(0, "old"), b: measured(0, "b's")}),
            ("v2", {a: measured(0, "new"), c: measured(1, "c's")}),
            ("v3", {a: measured(2, "later")}),
        ),
        1,
    ):
        assert await two.begin(version, FULL if number % 2 else NEXT) == number
        for url, before in seen.items():
            await two.step(number, url, before=before)
    await two.step(await two.begin("v1", FULL, "q"), a, before=measured(0, "q's"))

    async def earlier(url: str, index: int) -> str | None:
        read = partial(records.earlier, pool_id=1, url=url, policy_index=index)
        found = await two.served.plane.database.read(read)
        return None if found is None else found.label

    assert [await earlier(url, 0) for url in (a, b, c)] == ["new", "b's", None]
    assert [await earlier(url, 1) for url in (a, b, c)] == [None, None, "c's"]
    assert await earlier(a, 2) == "later"


async def test_a_server_that_loaded_what_was_refused_meanwhile_is_not_current(two: Pools) -> None:
    number = await two.begin("v1", FULL)
    targets = {url: await two.target(url) for url in two.urls[:2]}
    await two.step(number, two.urls[1], step="Verifying")
    await two.record(records.done, targets[two.urls[0]], observation=VERIFIED)
    first = (await two.status())["backends"][0]
    assert (first["weights"], first["policyVersion"], first["restartRequested"]) == ("Current", "v1", False)
    await two.refuse(number)
    with pytest.raises(records.Superseded):
        await two.record(records.done, targets[two.urls[1]], observation=VERIFIED)
    found = (await two.status())["backends"]
    assert [b["weights"] for b in found] == ["Failed"] * 2 + ["Current"] * 3
    assert found[1]["policyVersion"] == ""
    assert {(await two.target(url)).row.policy_index for url in two.urls[:2]} == {BEHIND}


async def test_pushed_weights_let_a_paused_pool_continue_and_others_do_not(two: Pools) -> None:
    for version, source, paused in (("v1", FULL, True), ("v2", PUSHED, False)):
        for name in "pq":
            await two.write(records.pause, namespace="default", name=name, mode="wait")
        await two.begin(version, source)
        for url in two.urls:
            await two.set("p", url, restart_requested=True)
            await two.record(records.done, await two.target(url), observation=VERIFIED)
        assert (await two.status())["paused"] == paused
        assert (await two.status("q"))["paused"], "another pool of the same servers"
        assert not any(b["restartRequested"] for b in (await two.status())["backends"])
    # A server that is brought to them later changes nothing about a later pause.
    await two.write(records.pause, namespace="default", name="p", mode="wait")
    await two.record(
        records.done, await two.target(two.urls[0]), observation=Observation(last=WeightStep.LOOK)
    )
    assert (await two.status())["paused"]


async def test_an_update_fails_only_if_no_server_can_load_it(two: Pools) -> None:
    number = await two.begin("v1", FULL)
    targets = [await two.target(url) for url in two.urls]
    for failed, target in enumerate(targets, 1):
        await two.record(records.failed, target, message="it is full", for_good=True)
        found = await two.update(number)
        last = failed == len(targets)
        assert found["state"] == ("Failed" if last else "Running")
        assert [part["step"] for part in found["backends"]].count("Failed") == failed
        if not last:
            asked = [b["restartRequested"] for b in (await two.status())["backends"]]
            assert asked == [True] * failed + [False] * (len(targets) - failed)
    assert target.row.url in found["message"]
    status = await two.status()
    assert status["policyVersion"] == ""
    assert not any(b["restartRequested"] for b in status["backends"]), "they may have what is wanted again"
    assert not any(b["restartRequested"] for b in (await two.status("q"))["backends"])


@pytest.mark.parametrize(
    ("changes", "weights", "index"),
    [
        ({}, "Updating", 0),
        ({"weights": "Stale"}, "Updating", BEHIND),
        # It has the index of the update, and is loaded with it again.
        ({"policy_index": 1}, "Updating", BEHIND),
        # Refused weights may be in it, and it stays so until it is verified.
        ({"weights": "Failed", "policy_index": BEHIND}, "Failed", BEHIND),
        ({"weights": "Failed", "restart_requested": True}, "Failed", BEHIND),
        ({"weights": "Failed"}, "Updating", BEHIND),
    ],
)
async def test_what_is_known_of_a_server_while_it_loads(
    changes: dict[str, Any], weights: str, index: int, two: Pools
) -> None:
    number = await two.begin("v1", FULL)
    url = two.urls[1]
    await two.set("p", url, **({"weights": "Current"} | changes))
    before = EarlierLogprobs(policy_index=0, label="default", prompt_ids=(1, 2), logprobs=(-1.0,))
    target = await two.target(url)
    await two.record(records.begin, target, observation=Observation(before=before))
    await two.record(records.advance, target, step="Loading")
    now = await two.target(url)
    assert (now.row.weights, now.row.policy_index) == (weights, index)
    await two.write(records.mark, target=now, values={"weights_message": "so far"})
    assert [b["message"] for b in (await two.status())["backends"]] == ["", "so far", "", "", ""]
    assert [b["weights"] for b in (await two.status("q"))["backends"]] == ["Current"] * 5
    assert [part["step"] for part in (await two.update(number))["backends"]] == [
        *("Pending", "Loading", "Pending", "Pending", "Pending")
    ]
    if changes and changes != {"policy_index": 1}:
        return
    # It begins once more, with nothing measured: what was measured before is kept.
    await two.record(records.begin, target, observation=Observation())
    read = partial(records.earlier, pool_id=1, url=url, policy_index=0)
    assert await two.served.plane.database.read(read) == before
    await two.begin("v2", NEXT)
    with pytest.raises(records.Superseded):
        await two.record(records.advance, target, step="Verifying")
    with pytest.raises(records.Superseded):
        await two.write(records.mark, target=target, values={"weights": "Current"})
