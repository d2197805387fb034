"""Weight updates of a pool that has no backend yet, and backends whose weights cannot be verified."""

from __future__ import annotations

import json
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_api.settings import Settings
from rollyard_api.weights.coordinator import UpdateLimits
from rollyard_api.weights.verification import PROMPT_TOKENS
from rollyard_testing.api.plane import serving
from rollyard_testing.inference.scripted import LOGPROB, REFERENCE, VllmShaped
from rollyard_testing.waiting import eventually


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a folder that a forward pass could be made of, as far as its files tell."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 100}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    return folder


@pytest.fixture
def forward(tmp_path: Path) -> Path:
    """Return a program in the place of a Python with transformers; it gives what new weights give."""
    program = tmp_path / "forward"
    answer = json.dumps({"logprobs": [LOGPROB["new"]] * (PROMPT_TOKENS - 1)})
    program.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{answer}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


class Pool:
    """A pool whose backends a test reports in a driver's place."""

    def __init__(self, served: Any, folder: Path) -> None:
        self.served, self.folder = served, folder

    async def report(self, *servers: VllmShaped) -> None:
        body = {"backends": [{"url": s.url, "ready": True, "policyVersion": s.label} for s in servers]}
        answer = await self.served.driver.put("/v1/backendpools/p/backends", json=body)
        assert answer.status_code == 200, answer.text

    async def post(self, version: str, **fields: Any) -> Any:
        source = {"checkpoint": {"path": str(self.folder)}}
        body = {"policyVersion": version, "source": source, "requireVerified": True, **fields}
        return await self.served.admin.post("/v1/backendpools/p/weights", json=body)

    async def begin(self, version: str, **fields: Any) -> int:
        answer = await self.post(version, **fields)
        assert answer.status_code == 202, answer.text
        number: int = answer.json()["id"]
        return number

    async def update(self, number: int, wait: float = 40.0) -> dict[str, Any]:
        path = f"/v1/backendpools/p/weights/{number}"
        found: dict[str, Any] = (await self.served.admin.get(path, params={"wait": wait})).json()
        return found

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.served.admin.get("/v1/backendpools/p")).json()["status"]
        return found

    async def backend(self) -> dict[str, Any]:
        (found,) = (await self.status())["backends"]
        return dict(found)


@pytest.fixture
async def pool(settings: Settings, checkpoint: Path, forward: Path) -> AsyncIterator[Pool]:
    quick = {"weights_seconds": 0.05, "weight_limits": UpdateLimits(look=0.2), "verify_python": str(forward)}
    async with serving(settings, **quick) as served:
        spec = {"model": "tiny", "engine": {"type": "vllm"}}
        manifest = {"apiVersion": "rollyard.dev/v1alpha1", "kind": "BackendPool"}
        body = manifest | {"metadata": {"name": "p"}, "spec": spec}
        assert (await served.admin.post("/v1/backendpools", json=body)).status_code == 201
        yield Pool(served, checkpoint)


@pytest.fixture
def server() -> Iterator[VllmShaped]:
    made = VllmShaped()
    yield made
    made.close()


async def test_an_update_of_an_empty_pool_waits_and_is_verified_on_the_first_backend(
    pool: Pool, server: VllmShaped
) -> None:
    number = await pool.begin("v1", reference=REFERENCE)
    waiting = await pool.update(number, wait=0.5)
    assert (waiting["state"], waiting["verified"], waiting["backends"]) == ("Running", False, [])
    assert "waits for a backend" in waiting["message"]
    await pool.report(server)
    done = await pool.update(number)
    assert (done["state"], done["verified"], done["verifiedBy"]) == ("Succeeded", True, "reference"), done
    assert (done["message"], [part["step"] for part in done["backends"]]) == ("", ["Done"])
    assert (server.label, server.weights, server.paused) == ("v1", "new", False)


async def test_the_first_backend_shows_that_an_update_cannot_be_verified(
    pool: Pool, server: VllmShaped, forward: Path
) -> None:
    forward.unlink()
    number = await pool.begin("v1")
    assert (await pool.update(number, wait=0.5))["state"] == "Running"
    await pool.report(server)
    done = await pool.update(number)
    assert (done["state"], done["verified"]) == ("Failed", False)
    assert "cannot be verified" in done["message"]

    async def serves() -> bool:
        return bool((await pool.backend())["weights"] == "Current")

    await eventually(serves)
    assert (server.label, server.weights, server.paused) == ("default", "old", False)
    assert not (await pool.backend())["restartRequested"]


async def test_a_later_update_supersedes_one_that_waits_for_a_backend(pool: Pool, server: VllmShaped) -> None:
    first = await pool.begin("v1", reference=REFERENCE)
    second = await pool.begin("v2", reference=REFERENCE)
    assert (await pool.update(first))["state"] == "Superseded"
    assert (await pool.update(second, wait=0.3))["state"] == "Running"
    await pool.report(server)
    done = await pool.update(second)
    assert (done["state"], done["verified"]) == ("Succeeded", True), done
    assert server.label == "v2"


async def test_an_update_whose_only_backend_vanishes_waits_for_the_next(
    pool: Pool, server: VllmShaped
) -> None:
    await pool.report(server)
    server.failing[server.paths["load"]] = 2
    number = await pool.begin("v1", reference=REFERENCE)
    await pool.report()
    waiting = await pool.update(number, wait=0.5)
    assert (waiting["state"], waiting["backends"]) == ("Running", [])
    assert "waits for a backend" in waiting["message"]
    server.failing.clear()
    server.restart()
    await pool.report(server)
    done = await pool.update(number)
    assert (done["state"], done["verified"]) == ("Succeeded", True), done


async def test_nothing_was_pushed_into_a_pool_without_backends(pool: Pool, server: VllmShaped) -> None:
    refused = await pool.post("v1", source={"pushed": True}, requireVerified=False)
    assert refused.status_code == 409
    assert "no backend" in refused.json()["detail"]
    await pool.report(server)
    assert (await pool.backend())["weights"] == "Current"


async def test_a_server_that_lost_weights_that_cannot_be_verified_any_more_is_not_restarted(
    pool: Pool, server: VllmShaped, checkpoint: Path
) -> None:
    await pool.report(server)
    done = await pool.update(await pool.begin("v1"))
    assert (done["state"], done["verifiedBy"]) == ("Succeeded", "transformers"), done
    (checkpoint / "model.safetensors").rename(checkpoint / "elsewhere")
    await pool.report()
    server.restart()
    await pool.report(server)

    async def reason() -> str:
        found = await pool.backend()
        assert not found["restartRequested"], "a restart would not make it verifiable"
        return found["message"] if "cannot be verified" in found["message"] else ""

    why = await eventually(reason)
    # A driver shows what it reads here, and reports it with the backend.
    body = {"backends": [{"url": server.url, "ready": True, "message": "of a driver"}]}
    assert (await pool.served.driver.put("/v1/backendpools/p/backends", json=body)).status_code == 200
    assert (await pool.backend())["message"] == why
    assert (await pool.backend())["weights"] == "Stale"
    assert (await pool.status())["readyReplicas"] == 0
    assert not server.paused
    (checkpoint / "elsewhere").rename(checkpoint / "model.safetensors")
    assert (await pool.update(await pool.begin("v2")))["verified"]
    assert (await pool.status())["readyReplicas"] == 1


async def test_a_backend_that_came_after_the_push_waits_until_they_are_pushed_again(
    pool: Pool, server: VllmShaped
) -> None:
    pushed = {"source": {"pushed": True}, "reference": REFERENCE}
    other = VllmShaped()
    try:
        await pool.report(other)
        other.failing[other.paths["label"]] = 1_000
        number = await pool.begin("v1", **pushed)
        await pool.report(server)

        async def behind() -> bool:
            return "push them again" in (await pool.backend())["message"]

        await eventually(behind)
        assert server.label == "default"
        again = await pool.post("v1", **pushed)
        assert (again.status_code, again.json()["id"]) == (200, number)
        assert {"url": server.url, "step": "Pending"}.items() <= again.json()["backends"][-1].items()
    finally:
        other.close()
