"""What a weight update decides from the tables and from folders alone, without a server."""

from __future__ import annotations

import asyncio
import json
import math
import os
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.core.problems import Conflict, Invalid
from rollyard_api.settings import Settings
from rollyard_api.storage.rows import BackendRow, PoolRow, WeightUpdateRow
from rollyard_api.storage.schema import backends, weight_updates
from rollyard_api.storage.schema import pools as pools_table
from rollyard_api.weights import (
    backend_progress,
    backend_targets,
    backend_weights,
    checkpoints,
    update_records,
)
from rollyard_api.weights.backend_progress import EarlierLogprobs
from rollyard_api.weights.backend_targets import PAUSED, BackendTarget, action
from rollyard_api.weights.coordinator import Coordinator
from rollyard_api.weights.limits import UpdateLimits
from rollyard_api.weights.loader import LoadFailed, Unreachable, WeightLoader
from rollyard_api.weights.plan import plan
from rollyard_api.weights.verification import Forward, Reference, Unverifiable, compare, fixed_prompt
from rollyard_crds.weights import PauseMode, WeightSource, WeightUpdateRequest
from rollyard_inference.errors import BackendMismatch, BackendRefused, NoSuchCall, ServerFailed
from rollyard_testing.api.databases import migrated_database

FULL, NEXT = {"checkpoint": {"path": "/full"}}, {"checkpoint": {"path": "/next"}}
ONE, TWO = ({"lora": {"name": name, "path": f"/{name}"}} for name in ("one", "two"))
PUSHED = {"pushed": True}


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
    found = plan(row, chain, label, begun=begun)
    assert list(found.sources) == [WeightSource.model_validate(source) for source in loaded]
    assert (f"{lost!r} were pushed by the trainer" in found.problem) if lost else not found.problem


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
    assert update_records.serves(updates(*sources)) == name


POOL = PoolRow(
    1, "", "default", "p", 1, b"{}", b"{}", b"{}", "m", "m", 8, True, 0.0, "v2", 2, False, None, None
)
BACKEND = BackendRow(
    *(1, "http://a", 0, True, "v2", "", "Current", "", 2, False, False),
    *("Closed", 0, None, None, None, None, None, None, None),
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
    assert action(replace(POOL, **pool), replace(BACKEND, **backend)) == expected


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
    assert (found.max_difference, found.place, found.agrees) == (difference, place, agrees)


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


@pytest.fixture
async def disk() -> AsyncIterator[Bulkhead]:
    made = Bulkhead("folders of weights", threads=2, waiting=8, seconds=20.0)
    yield made
    made.close()


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
    with pytest.raises(Unverifiable, match="is no Hugging Face folder"):
        await forward.reference(folder, 0.1)
    assert not (tmp_path / "calls").exists()


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Return settings with which nothing is done to servers."""
    return Settings(
        state_dir=tmp_path,
        db=migrated_database(request, "sqlite", tmp_path),
        sweep_seconds=3600.0,
        circuit_seconds=3600.0,
        stats_seconds=3600.0,
        health_seconds=3600.0,
        weights_seconds=3600.0,
    )


class Pools:
    """Two pools, `p` and `q`, of the same five servers."""

    def __init__(self, served: Any) -> None:
        self.served, self.urls = served, [f"http://s{number}" for number in range(1, 6)]

    async def make(self) -> None:
        for name in "pq":
            manifest = {
                "apiVersion": "rollyard.dev/v1alpha1",
                "kind": "BackendPool",
                "metadata": {"name": name},
                "spec": {"model": "m", "engine": {"type": "vllm"}},
            }
            assert (await self.served.admin.post("/v1/backendpools", json=manifest)).status_code == 201
            body = {"backends": [{"url": url, "ready": True} for url in self.urls]}
            answer = await self.served.driver.put(f"/v1/backendpools/{name}/backends", json=body)
            assert answer.status_code == 200, answer.text

    async def post(self, version: str, source: dict[str, Any], pool: str = "p", **fields: Any) -> Any:
        body = {"policyVersion": version, "source": source, "inFlight": "restart", **fields}
        return await self.served.admin.post(f"/v1/backendpools/{pool}/weights", json=body)

    async def begin(self, version: str, source: dict[str, Any], pool: str = "p") -> int:
        answer = await self.post(version, source, pool)
        assert answer.status_code == 202, answer.text
        number: int = answer.json()["id"]
        return number

    async def update(self, number: int, pool: str = "p") -> dict[str, Any]:
        found: dict[str, Any] = (
            await self.served.admin.get(f"/v1/backendpools/{pool}/weights/{number}")
        ).json()
        return found

    async def status(self, pool: str = "p") -> dict[str, Any]:
        found: dict[str, Any] = (await self.served.admin.get(f"/v1/backendpools/{pool}")).json()["status"]
        return found

    async def index(self, number: int) -> int:
        query = sa.select(weight_updates.c.policy_index).where(weight_updates.c.id == number)
        found: int = await self.served.plane.database.read(lambda conn: conn.scalar(query))
        return found

    async def set(self, pool: str, url: str, **values: Any) -> None:
        """Set columns of a backend."""
        ids = sa.select(pools_table.c.id).where(pools_table.c.name == pool).scalar_subquery()
        change = sa.update(backends).where(backends.c.pool_id == ids, backends.c.url == url).values(**values)
        await self.served.plane.database.write(lambda tx: tx.conn.execute(change) and None)

    async def step(self, number: int, url: str, **values: Any) -> None:
        """Set a backend's part of an update."""
        await self.write(update_records.note, update_id=number, url=url, **values)

    async def target(self, url: str) -> BackendTarget:
        """Return what the coordinator reads of a backend of `p`."""
        found: list[BackendTarget] = await self.served.plane.database.read(backend_targets.read)
        return next(one for one in found if one.key == (1, url))

    async def write(self, op: Callable[..., Any], **values: Any) -> None:
        await self.served.plane.database.write(partial(op, **values))

    async def settle(self, pool: int = 1) -> None:
        await self.write(update_records.settle, pool_id=pool)

    async def succeed(self, number: int) -> None:
        """Let every backend have the weights."""
        index = await self.index(number)
        version = (await self.update(number))["policyVersion"]
        for url in self.urls:
            await self.set("p", url, policy_index=index, policy_version=version, weights="Current")
            await self.step(number, url, step="Done", verified=True)
        await self.settle()
        assert (await self.update(number))["state"] == "Succeeded"

    async def refuse(self, number: int, refused_by: str = "") -> None:
        await self.write(
            update_records.refuse, pool_id=1, update_id=number, message="wrong", refused_by=refused_by
        )


@pytest.fixture
async def two(settings: Settings, serving: Any) -> AsyncIterator[Pools]:
    async with serving(settings) as served:
        made = Pools(served)
        await made.make()
        yield made


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
    await two.refuse(other)
    assert (await two.update(other, "q"))["state"] == "Running", "it is no update of this pool"
    await two.refuse(number, refused_by=two.urls[refused])
    await two.refuse(number)
    status = await two.status()
    assert [at for at, b in enumerate(status["backends"]) if b["weights"] == "Failed"] == failed
    assert {b["weights"] for b in status["backends"]} == {"Updating", "Failed"}
    assert [at for at, b in enumerate(status["backends"]) if not b["restartRequested"]] == failed
    indices = [(await two.target(url)).row.policy_index for url in two.urls]
    assert [at for at, index in enumerate(indices) if index == update_records.BEHIND] == failed
    needed = [(await two.target(two.urls[at])) for at in failed]
    assert {action(one.pool, one.row) for one in needed} == {"bring"}, "they load the earlier weights again"
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
        adding = partial(update_records.add, namespace="default", name="p", asked=asked, note="")
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
        read = partial(backend_progress.earlier, pool_id=1, url=url, policy_index=index)
        found = await two.served.plane.database.read(read)
        return None if found is None else found.label

    assert [await earlier(url, 0) for url in (a, b, c)] == ["new", "b's", None]
    assert [await earlier(url, 1) for url in (a, b, c)] == [None, None, "c's"]
    assert await earlier(a, 2) == "later"


async def test_a_server_that_loaded_what_was_refused_meanwhile_is_not_current(two: Pools) -> None:
    number = await two.begin("v1", FULL)
    targets = {url: await two.target(url) for url in two.urls[:2]}
    await two.write(backend_weights.done, target=targets[two.urls[0]], verified=True, comparison=None)
    first = (await two.status())["backends"][0]
    assert (first["weights"], first["policyVersion"], first["restartRequested"]) == ("Current", "v1", False)
    await two.refuse(number)
    await two.write(backend_weights.done, target=targets[two.urls[1]], verified=True, comparison=None)
    found = (await two.status())["backends"]
    assert [b["weights"] for b in found] == ["Failed"] * 2 + ["Current"] * 3
    assert found[1]["policyVersion"] == ""
    assert {(await two.target(url)).row.policy_index for url in two.urls[:2]} == {update_records.BEHIND}


async def test_pushed_weights_let_a_paused_pool_continue_and_others_do_not(two: Pools) -> None:
    for version, source, paused in (("v1", FULL, True), ("v2", PUSHED, False)):
        for name in "pq":
            await two.write(update_records.pause, namespace="default", name=name, mode="wait")
        await two.begin(version, source)
        for url in two.urls:
            await two.set("p", url, restart_requested=True)
            await two.write(
                backend_weights.done, target=await two.target(url), verified=True, comparison=None
            )
        assert (await two.status())["paused"] == paused
        assert (await two.status("q"))["paused"], "another pool of the same servers"
        assert not any(b["restartRequested"] for b in (await two.status())["backends"])
    # A server that is brought to them later changes nothing about a later pause.
    await two.write(update_records.pause, namespace="default", name="p", mode="wait")
    await two.write(
        backend_weights.done, target=await two.target(two.urls[0]), verified=None, comparison=None
    )
    assert (await two.status())["paused"]


async def test_an_update_fails_only_if_no_server_can_load_it(two: Pools) -> None:
    number = await two.begin("v1", FULL)
    targets = [await two.target(url) for url in two.urls]
    for failed, target in enumerate(targets, 1):
        await two.write(backend_weights.give_up_loading, target=target, message="it is full")
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
        ({"weights": "Stale"}, "Updating", update_records.BEHIND),
        # It has the index of the update, and is loaded with it again.
        ({"policy_index": 1}, "Updating", update_records.BEHIND),
        # Refused weights may be in it, and it stays so until it is verified.
        ({"weights": "Failed", "policy_index": update_records.BEHIND}, "Failed", update_records.BEHIND),
        ({"weights": "Failed", "restart_requested": True}, "Failed", update_records.BEHIND),
        ({"weights": "Failed"}, "Updating", update_records.BEHIND),
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
    await two.write(backend_weights.begin, name="me", target=target, fence=False, before=before)
    await two.write(backend_weights.note, name="me", target=target, values={"step": "Loading"})
    now = await two.target(url)
    assert (now.row.weights, now.row.policy_index) == (weights, index)
    await two.write(backend_weights.mark, target=now, values={"weights_message": "so far"})
    assert [b["message"] for b in (await two.status())["backends"]] == ["", "so far", "", "", ""]
    assert [b["weights"] for b in (await two.status("q"))["backends"]] == ["Current"] * 5
    assert [part["step"] for part in (await two.update(number))["backends"]] == [
        *("Pending", "Loading", "Pending", "Pending", "Pending")
    ]
    if changes and changes != {"policy_index": 1}:
        return
    # It begins once more, with nothing measured: what was measured before is kept.
    await two.write(backend_weights.begin, name="me", target=target, fence=False)
    read = partial(backend_progress.earlier, pool_id=1, url=url, policy_index=0)
    assert await two.served.plane.database.read(read) == before
    await two.begin("v2", NEXT)
    with pytest.raises(backend_weights.Superseded):
        await two.write(backend_weights.note, name="me", target=target, values={"step": "Verifying"})
    with pytest.raises(backend_weights.Superseded):
        await two.write(backend_weights.mark, target=target, values={"weights": "Current"})


class Server:
    """The weight calls of a server, each noted in `calls`.

    Args:
        missing: The calls that it does not have.
        gives: The log-probability of each token, by the folder that was loaded last.
    """

    pause_modes: frozenset[PauseMode] = frozenset({"abort", "wait", "keep"})

    def __init__(
        self, label: str = "default", *, missing: Sequence[str] = (), gives: dict[str, float] | None = None
    ) -> None:
        self.calls: list[str] = []
        self.loaded = "/first"
        self.fails: Exception | None = None
        self.paused = False
        self._label, self._missing = label, missing
        self._gives = {"/first": -1.0, "/full": -2.0, "/next": -3.0} if gives is None else gives

    def _has(self, name: str, noted: str = "") -> None:
        if name in self._missing:
            raise NoSuchCall(name)
        if noted:
            self.calls.append(noted)

    async def label(self) -> str:
        self._has("label")
        return self._label

    async def set_label(self, version: str) -> None:
        self._has("set_label", f"label {version}")
        self._label = version

    async def is_paused(self) -> bool:
        return self.paused

    async def pause(self, mode: PauseMode) -> None:
        self._has("pause", f"pause {mode}")
        self.paused = True

    async def resume(self) -> None:
        self._has("resume", "resume")
        self.paused = False

    async def reset_prefix_cache(self) -> None:
        self._has("flush", "flush")

    async def load(self, source: WeightSource) -> None:
        if self.fails is not None:
            raise self.fails
        found = source.checkpoint or source.lora
        assert found is not None
        self._has("load", f"load {found.path}")
        self.loaded = found.path

    async def reload(self, path: str) -> None:
        self._has("reload", f"reload {path}")
        self.loaded = path

    async def folder(self) -> str | None:
        return "/first"

    async def dtype(self) -> str | None:
        return None

    async def reports_versions_of_tokens(self, model: str) -> bool:
        return True

    async def prompt_logprobs(self, model: str, ids: Sequence[int]) -> list[float]:
        self._has("measure", "measure")
        return [self._gives[self.loaded]] * (len(ids) - 1)


@pytest.fixture
def loader(two: Pools, disk: Bulkhead) -> WeightLoader:
    """Return a loader that knows no transformers."""
    return WeightLoader(two.served.plane.database, Forward("", disk), "me")


def reference(value: float) -> dict[str, Any]:
    return {"promptIds": [1, 2, 3], "logprobs": [value] * 2, "tolerance": 0.1}


VERIFIED = ["label unverified:v1", "flush", "resume", "measure"]


@pytest.mark.parametrize(
    ("fields", "missing", "calls", "weights", "part", "state"),
    [
        # Its tokens carry the label of the update only once its weights are verified.
        (
            {"mode": "wait", "reference": reference(-2.0)},
            [],
            ["measure", "pause wait", "load /full", *VERIFIED, "label v1"],
            ("Current", "v1"),
            ("Done", True, ""),
            "Running",
        ),
        (
            {"reference": reference(-2.3)},
            [],
            ["measure", "pause abort", "load /full", *VERIFIED, "pause abort"],
            ("Failed", ""),
            ("Failed", False, "differ by up to 0.3 nats"),
            "Failed",
        ),
        # There is nothing to compare with.
        (
            {},
            [],
            ["measure", "pause abort", "load /full", "label v1", "flush", "resume"],
            ("Current", "v1"),
            ("Done", False, "not verified: no reference was given"),
            "Running",
        ),
        ({"requireVerified": True}, [], [], ("Current", ""), ("Pending", False, ""), "Failed"),
        (
            {"reference": reference(-2.0)},
            ["measure"],
            ["pause abort", "load /full", *VERIFIED[:-1], "label v1"],
            ("Current", "v1"),
            ("Done", False, "not verified: measure"),
            "Running",
        ),
        (
            {"reference": reference(-2.0), "requireVerified": True},
            ["measure"],
            ["pause abort", "load /full", *VERIFIED[:-1], "pause abort"],
            ("Failed", ""),
            ("Failed", False, "measure"),
            "Failed",
        ),
        # No rollout continues over the update, so nothing has to tell its tokens apart.
        (
            {"inFlight": "restart"},
            ["label", "set_label", "flush", "pause", "resume"],
            ["load /full"],
            ("Current", "v1"),
            ("Done", False, "not verified: no reference"),
            "Running",
        ),
    ],
)
async def test_the_calls_that_bring_a_server_to_an_update(
    fields: dict[str, Any],
    missing: list[str],
    calls: list[str],
    weights: tuple[str, str],
    part: tuple[str, bool, str],
    state: str,
    two: Pools,
    loader: WeightLoader,
) -> None:
    answer = await two.post("v1", FULL, **({"inFlight": "continue"} | fields))
    number, url = answer.json()["id"], two.urls[1]
    server = Server(missing=missing)
    await loader.bring(await two.target(url), server)
    assert server.calls == calls
    found = (await two.status())["backends"]
    assert (found[1]["weights"], found[1]["policyVersion"], found[1]["restartRequested"]) == (*weights, False)
    assert {b["weights"] for b in (found[0], *found[2:])} == {"Current"}
    update = await two.update(number)
    ended = update["backends"][1]
    assert (ended["step"], ended["verified"]) == part[:2]
    assert part[2] in ended["message"]
    assert {one["step"] for one in (update["backends"][0], *update["backends"][2:])} == {"Pending"}
    assert update["state"] == state
    assert update["verifiedBy"] == ("reference" if "reference" in fields else "")


@pytest.mark.parametrize("lacks", ["pause", "set_label", "flush", "resume"])
async def test_rollouts_continue_only_over_an_update_of_a_server_that_has_all_calls(
    lacks: str, two: Pools, loader: WeightLoader
) -> None:
    await two.post("v1", FULL, inFlight="continue")
    with pytest.raises(NoSuchCall, match=lacks):
        await loader.bring(await two.target(two.urls[0]), Server(missing=[lacks]))
    assert (await two.status())["backends"][0]["weights"] == "Updating"


async def test_a_server_that_was_not_ready_for_a_time_loads_only_what_it_lost(
    two: Pools, loader: WeightLoader
) -> None:
    a, b, c, d, e = two.urls
    await two.succeed(await two.begin("v1", FULL))
    await two.begin("v2", ONE)
    for url in two.urls:
        await two.set("p", url, weights="Stale", weights_message="it is not ready")

    async def brought(url: str, server: Server) -> list[str]:
        await loader.bring(await two.target(url), server)
        found = next(one for one in (await two.status())["backends"] if one["url"] == url)
        assert (found["weights"], found["message"]) == ("Current", "")
        return server.calls

    ends = ["label v2", "flush", "resume"]
    assert await brought(a, Server("v1")) == ["pause abort", "load /one", *ends]
    assert await brought(b, Server("default")) == ["pause abort", "load /full", "load /one", *ends]
    # The label may be that of an attempt of this update which was not completed.
    assert await brought(c, Server("v2")) == ["pause abort", "load /full", "load /one", *ends]
    for url in (d, e):
        assert await brought(url, Server("v1")) == ["pause abort", "load /one", *ends]
    for url in (a, b):
        await two.set("p", url, weights="Stale", policy_index=update_records.BEHIND)
    assert await brought(a, Server("v2")) == ["resume"], "nothing was lost"
    assert await brought(b, Server("unverified:v2")) == ["pause abort", "load /full", "load /one", *ends]


async def test_a_server_that_has_lost_pushed_weights_waits_for_them(two: Pools, loader: WeightLoader) -> None:
    number = await two.begin("v1", PUSHED)
    await two.succeed(number)
    await two.set("p", two.urls[2], weights="Stale", policy_index=update_records.BEHIND)
    server = Server()
    with pytest.raises(Unreachable):
        await loader.bring(await two.target(two.urls[2]), server)
    assert server.calls == [], "nothing is done to it"
    found = (await two.status())["backends"]
    assert [b["weights"] for b in found] == ["Current", "Current", "Stale", "Current", "Current"]
    assert "push them again" in found[2]["message"]


@pytest.mark.parametrize("error", [ServerFailed("disk"), BackendRefused("disk"), BackendMismatch("disk")])
async def test_a_server_that_fails_to_load_gets_no_label(
    error: Exception, two: Pools, loader: WeightLoader
) -> None:
    number = await two.begin("v1", FULL)
    server = Server()
    server.fails = error
    with pytest.raises(LoadFailed, match="disk"):
        await loader.bring(await two.target(two.urls[0]), server)
    assert server.calls == ["measure", "pause abort"]
    assert (await two.status())["backends"][0]["weights"] == "Updating"
    assert (await two.update(number))["backends"][0]["step"] == "Loading"


async def test_servers_go_back_to_what_they_had_before_refused_weights(
    two: Pools, loader: WeightLoader
) -> None:
    """They are compared with what they gave themselves, although the reference is wrong."""
    a, b, c, d, _ = two.urls
    servers = {url: Server() for url in (a, b, c, d)}
    number = (await two.post("v1", FULL, reference=reference(-9.0), inFlight="continue")).json()["id"]
    for url, folder in ((a, "/first"), (b, "/first"), (c, None)):
        gave = EarlierLogprobs(
            policy_index=0, label="mine", folder=folder, prompt_ids=(1, 2), logprobs=(-1.0,)
        )
        begin = partial(backend_weights.begin, name="me", target=await two.target(url), fence=False)
        await two.write(begin, before=gave)
        await two.step(number, url, step="Verifying")
    await loader.bring(await two.target(d), servers[d])
    assert (await two.update(number))["state"] == "Failed"
    servers[b]._gives = {"/first": -1.7}
    for url, server in servers.items():
        server.calls.clear()
        server._label = "unverified:v1"
        await loader.bring(await two.target(url), server)
    again = ["pause abort", "reload /first", "label unverified:mine", "flush", "resume", "measure"]
    refused = ["pause abort", "label unverified:refused"]
    assert servers[a].calls == [*again, "label mine"]
    assert servers[b].calls == [*again, *refused], "it gives something else than before"
    assert servers[c].calls == refused, "nobody knows its folder"
    default = [one.replace("mine", "default") for one in again]
    assert servers[d].calls == [*default, "label default"], "it was measured before it was paused"
    found = (await two.status())["backends"]
    assert [one["weights"] for one in found] == ["Current", "Failed", "Failed", "Current", "Current"]
    assert [one["policyVersion"] for one in found] == ["mine", "", "", "default", ""]
    assert [one["restartRequested"] for one in found] == [False, True, True, False, False]
    assert "is wrong too" in found[1]["message"]
    assert "does not say which folder" in found[2]["message"]


async def test_a_server_that_was_to_be_restarted_is_believed_only_after_it(
    two: Pools, loader: WeightLoader
) -> None:
    await two.begin("v1", FULL)
    target = await two.target(two.urls[0])
    await two.write(backend_weights.restart, target=target, message="it does not load them")
    found = (await two.status())["backends"]
    assert [(b["weights"], b["restartRequested"]) for b in found] == [
        ("Failed", True),
        *[("Current", False)] * 4,
    ]
    target = await two.target(two.urls[0])
    assert action(target.pool, target.row) == "watch"
    await two.set("p", two.urls[0], restart_requested=False)
    for label, calls in (
        ("unverified:v1", ["pause abort", "label unverified:refused"]),
        ("default", ["pause abort", "load /full", "label v1", "flush", "resume"]),
    ):
        server = Server(label)
        await loader.bring(await two.target(two.urls[0]), server)
        assert server.calls == calls
        now = (await two.status())["backends"][0]
        restart = label != "default"
        assert (now["weights"], now["restartRequested"]) == ("Failed" if restart else "Current", restart)
        if restart:
            await two.set("p", two.urls[0], restart_requested=False)


async def test_a_server_measures_what_it_has_only_while_that_is_certain(
    two: Pools, loader: WeightLoader
) -> None:
    """Otherwise refused weights would later be taken for the earlier ones."""
    await two.succeed(await two.begin("v1", FULL))
    number = await two.begin("v2", NEXT)
    a, b, c, d, e = two.urls
    await two.set("p", b, weights="Stale")
    await two.set("p", c, policy_index=0)
    servers = {url: Server("v1") for url in two.urls}
    servers[d]._label = "unverified:v1"
    servers[e]._label = "v2"
    for url, server in servers.items():
        server.loaded = "/full"
        await loader.bring(await two.target(url), server)
    assert [url for url, server in servers.items() if "measure" in server.calls] == [a]
    read = partial(backend_progress.earlier, pool_id=1, policy_index=1)
    gave = {url: await two.served.plane.database.read(partial(read, url=url)) for url in two.urls}
    assert {url for url, before in gave.items() if before is not None} == {a}
    assert gave[a].label == "v1"
    assert gave[a].folder is None, "only the first weights are those of a folder"
    assert gave[a].prompt_ids == tuple(fixed_prompt(256))
    assert set(gave[a].logprobs) == {-2.0}
    assert (await two.update(number))["state"] == "Succeeded"


@pytest.mark.parametrize("measures", [True, False])
async def test_earlier_weights_are_served_again_only_if_they_can_be_verified(
    measures: bool, two: Pools, loader: WeightLoader
) -> None:
    """The update that is refused may be on the servers still, although the earlier one asks for no proof."""
    first = (await two.post("v1", FULL, reference=reference(-2.0))).json()["id"]
    await two.succeed(first)
    number = await two.begin("v2", NEXT)
    await two.step(number, two.urls[0], step="Verifying")
    await two.refuse(number)
    server = Server("unverified:v2", missing=() if measures else ("measure",))
    server.loaded = "/next"
    await loader.bring(await two.target(two.urls[0]), server)
    found = (await two.status())["backends"][0]
    if measures:
        assert (found["weights"], found["policyVersion"], found["restartRequested"]) == (
            *("Current", "v1"),
            False,
        )
        assert not server.paused
    else:
        assert (found["weights"], found["restartRequested"]) == ("Failed", True)
        assert server.paused, "it gives no more tokens"
        assert server._label.startswith("unverified:")
    assert [b["weights"] for b in (await two.status())["backends"][1:]] == ["Current"] * 4


@pytest.mark.parametrize(
    ("owner", "expires", "taken"),
    [
        (None, None, True),
        ("me", 60.0, True),
        ("me", -60.0, True),
        ("other", 60.0, False),
        ("other", -60.0, True),
        ("other", None, True),
    ],
)
async def test_an_update_is_taken_over_once_its_owner_is_silent(
    owner: str | None, expires: float | None, taken: bool, two: Pools
) -> None:
    """As on PostgreSQL, where several control planes share the tables."""
    numbers = [await two.begin("v1", FULL, pool) for pool in "pq"]
    target = await two.target(two.urls[0])

    def take(tx: Any) -> tuple[str, list[str | None]]:
        until = None if expires is None else tx.now + expires
        tx.conn.execute(sa.update(weight_updates).values(owner=owner, owner_expires=until))
        try:
            backend_weights.take_charge(replace(tx, sqlite=False), "me", target)
            said = "taken"
        except backend_weights.Superseded:
            said = "superseded"
        query = sa.select(weight_updates.c.owner).order_by(weight_updates.c.id)
        owners = list(tx.conn.scalars(query))
        expiry = tx.conn.scalar(sa.select(weight_updates.c.owner_expires).limit(1))
        assert (expiry == tx.now + backend_weights.OWNER_SECONDS) == taken
        return said, owners

    said, owners = await two.served.plane.database.write(take)
    assert len(numbers) == 2
    assert (said, owners) == (("taken", ["me", owner]) if taken else ("superseded", [owner, owner]))


async def test_a_control_plane_renews_only_its_own_updates(two: Pools) -> None:
    numbers = [await two.begin("v1", FULL, pool) for pool in "pq"]
    for number, owner in zip(numbers, ("me", "other"), strict=True):
        change = sa.update(weight_updates).where(weight_updates.c.id == number)
        change = change.values(owner=owner, owner_expires=1.0)
        await two.served.plane.database.write(lambda tx, change=change: tx.conn.execute(change) and None)

    async def expires() -> list[bool]:
        query = sa.select(weight_updates.c.owner_expires).order_by(weight_updates.c.id)
        found = await two.served.plane.database.read(lambda conn: list(conn.scalars(query)))
        return [one != 1.0 for one in found]

    await two.write(backend_weights.renew, name="me", ids={numbers[1]})
    assert await expires() == [False, False]
    await two.write(backend_weights.renew, name="me", ids=set(numbers))
    assert await expires() == [True, False]


class Rounds:
    """A coordinator of its own, over servers that note their calls."""

    def __init__(self, two: Pools, forward: Forward, servers: dict[str, Server]) -> None:
        self._two, self.servers = two, servers
        transport: Any = None
        self.coordinator = Coordinator(
            two.served.plane.database, transport, forward, UpdateLimits(look=0.0), name="me"
        )

    def control(self, _transport: Any, url: str, _limits: Any) -> Any:
        """Return the control of a server, as `weight_control` does."""

        async def found() -> Server:
            return self.servers[url]

        return found()

    async def weights(self) -> list[str]:
        return [b["weights"] for b in (await self._two.status())["backends"]]


@pytest.fixture
async def rounds(two: Pools, disk: Bulkhead, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rounds]:
    made = Rounds(two, Forward("", disk), {url: Server() for url in two.urls})
    monkeypatch.setattr("rollyard_api.weights.coordinator.weight_control", made.control)
    yield made
    await made.coordinator.close()


async def test_every_server_that_was_restarted_is_noticed(
    two: Pools, rounds: Rounds, eventually: Callable[..., Any]
) -> None:
    """A server that calls its weights otherwise than they were called gets the weights again."""
    number = await two.begin("v1", FULL)
    for url in two.urls:
        rounds.servers[url]._label = "v1"
    rounds.servers[two.urls[3]]._missing = ("label",)
    await two.succeed(number)
    for _ in range(3):
        await rounds.coordinator.round()
        await asyncio.sleep(0)
    assert await rounds.weights() == ["Current"] * 5
    for url in (two.urls[1], two.urls[4]):
        rounds.servers[url]._label = "default"

    async def loaded() -> bool:
        await rounds.coordinator.round()
        calls = {url: server.calls for url, server in rounds.servers.items() if server.calls}
        ends = ["pause abort", "load /full", "label v1", "flush", "resume"]
        return calls == {two.urls[1]: ends, two.urls[4]: ends}

    await eventually(loaded, 10)

    async def current() -> bool:
        return await rounds.weights() == ["Current"] * 5

    await eventually(current, 10)
    assert (await two.update(number))["state"] == "Succeeded"


async def test_a_paused_pool_pauses_its_servers_in_its_mode_and_resumes_them(
    two: Pools, rounds: Rounds, eventually: Callable[..., Any]
) -> None:
    await two.write(update_records.pause, namespace="default", name="p", mode="keep")
    rounds.servers[two.urls[2]]._missing = ("resume",)

    async def paused() -> bool:
        await rounds.coordinator.round()
        found = (await two.status())["backends"]
        return [(b["weights"], b["message"]) for b in found] == [("Updating", PAUSED)] * 5

    await eventually(paused, 10)
    assert [server.calls for server in rounds.servers.values()] == [["pause keep"]] * 5
    assert {b["weights"] for b in (await two.status("q"))["backends"]} == {"Current"}
    await two.write(update_records.resume, namespace="default", name="p")

    async def resumed() -> bool:
        await rounds.coordinator.round()
        return await rounds.weights() == ["Current"] * 5

    await eventually(resumed, 10)
    calls = [server.calls for server in rounds.servers.values()]
    assert calls == [["pause keep", *([] if at == 2 else ["resume"])] for at in range(5)]
    assert {b["message"] for b in (await two.status())["backends"]} == {""}


async def test_a_server_that_refuses_what_it_is_to_load_keeps_what_it_has(
    two: Pools, rounds: Rounds, eventually: Callable[..., Any]
) -> None:
    """One refusal is enough, since the request is wrong; an error is tried again."""
    first = await two.begin("v1", FULL)
    await two.succeed(first)
    for server in rounds.servers.values():
        server._label, server.loaded = "v1", "/full"
    number = await two.begin("v2", NEXT)
    for server in rounds.servers.values():
        server.fails = BackendRefused("no such layer")

    async def failed() -> bool:
        await rounds.coordinator.round()
        return str((await two.update(number))["state"]) == "Failed"

    await eventually(failed, 10)
    assert "no such layer" in (await two.update(number))["message"]
    assert (await two.status())["policyVersion"] == "v1"
    for server in rounds.servers.values():
        server.fails = None

    async def back() -> bool:
        await rounds.coordinator.round()
        return await rounds.weights() == ["Current"] * 5

    await eventually(back, 20)
    assert {b["policyVersion"] for b in (await two.status())["backends"]} == {"v1"}
    assert {server.loaded for server in rounds.servers.values()} == {"/full"}
    assert not any(b["restartRequested"] for b in (await two.status())["backends"])
    assert {server._label for server in rounds.servers.values()} == {"v1"}


async def test_a_server_that_is_watched_is_believed_once_it_has_a_label_of_its_own(
    two: Pools, rounds: Rounds, eventually: Callable[..., Any]
) -> None:
    await two.begin("v1", FULL)
    for url in two.urls:
        await two.write(backend_weights.restart, target=await two.target(url), message="it is wrong")
        rounds.servers[url]._label = "unverified:refused"
        await two.set("p", url, ready=False)
    rounds.servers[two.urls[1]]._label = "default"

    async def again() -> bool:
        await rounds.coordinator.round()
        return not (await two.status())["backends"][1]["restartRequested"]

    await eventually(again, 10)
    await rounds.coordinator.round()
    asked = [b["restartRequested"] for b in (await two.status())["backends"]]
    assert asked == [True, False, True, True, True]
    waiting = [server.calls for url, server in rounds.servers.items() if url != two.urls[1]]
    assert waiting == [[]] * 4, "nothing is done to a server that waits for its restart"
