"""Weight updates on real engines: loaded, verified, labelled, refused, rolled back and healed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import rollyard_engine
from rollyard_api.settings import Settings
from rollyard_api.weights.coordinator import UpdateLimits
from rollyard_inference.weights.connect import VllmWeights
from rollyard_testing.api.databases import migrated_database
from rollyard_testing.api.plane import serving
from rollyard_testing.api.weights import backends_of, until_backends
from rollyard_testing.manifests import pool_manifest
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

MODEL = Path(rollyard_engine.__file__).parent / "models" / "tiny-policy"
IDS = [(7 * i * i + 3) % 300 for i in range(40)]


class Engine:
    """An engine process on a port that stays the same over restarts."""

    def __init__(self, folder: Path, model: Path = MODEL) -> None:
        self._folder, self._model, self.port = folder, model, 0
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it serves."""
        port_file = self._folder / "port"
        port_file.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "rollyard_engine", "--model", str(self._model), "--port", str(self.port)),
            *("--port-file", str(port_file), "--served-model-name", "tiny"),
        ]
        self.popen = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        end = time.monotonic() + patience(30)
        while not port_file.exists():
            assert self.popen.poll() is None, "the engine did not start"
            assert time.monotonic() < end, "the engine did not start in time"
            time.sleep(0.02)
        self.port = int(port_file.read_text())
        self.url = f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(patience(10))

    def heal(self) -> None:
        """Restore the state after its start, whatever a test did to it."""
        if self.popen.poll() is not None:
            self.start()
        elif (self.label(), self.paused()) != ("0", False):
            self.push(self._model)
            for path, body in (("update_weight_version", {"new_version": "0"}), ("resume", None)):
                assert httpx.post(f"{self.url}/{path}", json=body, timeout=patience(30)).status_code == 200

    def label(self) -> str:
        version: str = httpx.get(f"{self.url}/weight_info", timeout=patience(10)).json()["weight_version"]
        return version

    def paused(self) -> bool:
        return bool(httpx.get(f"{self.url}/is_paused", timeout=patience(10)).json()["is_paused"])

    def push(self, folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        assert httpx.post(f"{self.url}/collective_rpc", json=body, timeout=patience(30)).status_code == 200

    def logprobs(self) -> list[float]:
        body = {"prompt": IDS, "max_tokens": 1, "prompt_logprobs": 0}
        choice = httpx.post(f"{self.url}/v1/completions", json=body, timeout=patience(30)).json()["choices"][
            0
        ]
        pairs = zip(IDS[1:], choice["prompt_logprobs"][1:], strict=True)
        return [entry[str(token)]["logprob"] for token, entry in pairs]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same network with every number changed by some per cent."""
    folder = tmp_path_factory.mktemp("other") / "other"
    shutil.copytree(MODEL, folder)
    data = folder / "model.onnx.data"
    numbers = np.fromfile(data, dtype=np.float32)
    noise = np.random.default_rng(0).normal(1.0, 0.05, numbers.shape).astype(np.float32)
    (numbers * noise).tofile(data)
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    made = [Engine(tmp_path_factory.mktemp("engine")) for _ in range(2)]
    yield made
    for engine in made:
        engine.kill()


@pytest.fixture(scope="module")
def references(
    running: list[Engine], other: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Return what the two sets of weights give, from engines that were started on them."""
    running[0].heal()
    engine = Engine(tmp_path_factory.mktemp("reference"), other)
    logprobs = {"first": running[0].logprobs(), "other": engine.logprobs()}
    engine.kill()
    assert max(abs(a - b) for a, b in zip(*logprobs.values(), strict=True)) > 0.1
    return {name: {"promptIds": IDS, "logprobs": one, "tolerance": 0.01} for name, one in logprobs.items()}


@pytest.fixture
def engines(running: list[Engine]) -> list[Engine]:
    """Return two engines with their first weights."""
    for engine in running:
        engine.heal()
    return running


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Return settings on SQLite, or on what a test's parameter names, with short waits."""
    return Settings(
        state_dir=tmp_path,
        db=migrated_database(request, getattr(request, "param", "sqlite"), tmp_path),
        sweep_seconds=3600.0,
        circuit_seconds=3600.0,
        stats_seconds=3600.0,
        speeds_seconds=3600.0,
        recheck_seconds=0.2,
        health_seconds=0.2,
        weights_seconds=0.05,
        weight_limits=UpdateLimits(look=0.2),
    )


@pytest.fixture
async def yard(settings: Settings, engines: list[Engine]) -> AsyncIterator[Any]:
    """Yield a control plane with a ready pool of the two engines."""
    async with serving(settings) as served:
        await make_pool(served.admin, [engine.url for engine in engines])
        yield served


async def make_pool(admin: httpx.AsyncClient, urls: list[str]) -> None:
    manifest = pool_manifest(
        "p", {"model": "tiny", "engine": {"type": "external", "external": {"urls": urls}}}
    )
    assert (await admin.post("/v1/backendpools", json=manifest)).status_code == 201
    await until_backends(admin, lambda found: all(b["ready"] for b in found))


async def status_of(admin: httpx.AsyncClient) -> dict[str, Any]:
    status: dict[str, Any] = (await admin.get("/v1/backendpools/p")).json()["status"]
    return status


async def post(
    admin: httpx.AsyncClient, version: str, source: dict[str, Any], **fields: Any
) -> httpx.Response:
    return await admin.post(
        "/v1/backendpools/p/weights", json={"policyVersion": version, "source": source, **fields}
    )


async def update(admin: httpx.AsyncClient, version: str, folder: Path, **fields: Any) -> dict[str, Any]:
    """Ask for an update and wait for its end."""
    answer = await post(admin, version, {"checkpoint": {"path": str(folder)}}, **fields)
    assert answer.status_code == 202, answer.text
    done = await admin.get(f"/v1/backendpools/p/weights/{answer.json()['id']}", params={"wait": 40})
    found: dict[str, Any] = done.json()
    return found


@pytest.mark.parametrize("settings", ["sqlite", "postgresql"], indirect=True)
async def test_update_is_verified_on_every_backend(
    yard: Any, engines: list[Engine], other: Path, references: Any
) -> None:
    done = await update(yard.admin, "v1", other, reference=references["other"])
    assert (done["state"], done["verified"], done["verifiedBy"]) == ("Succeeded", True, "reference"), done
    for part in done["backends"]:
        assert part["step"] == "Done"
        assert part["maxDifference"] < 0.01
        assert part["pausedSeconds"] > 0
    status = await status_of(yard.admin)
    assert status["policyVersion"] == "v1"
    assert {(b["weights"], b["policyVersion"]) for b in status["backends"]} == {("Current", "v1")}
    assert [(e.label(), e.paused()) for e in engines] == [("v1", False)] * 2
    assert engines[0].logprobs() == pytest.approx(references["other"]["logprobs"], abs=1e-4)
    source = {"checkpoint": {"path": str(other)}}
    again = await post(yard.admin, "v1", source)
    assert (again.status_code, again.json()["id"]) == (200, done["id"])
    clash = await post(yard.admin, "v1", {"checkpoint": {"path": str(MODEL)}})
    assert (clash.status_code, clash.json()["reason"]) == (409, "PolicyVersionExists")
    metrics = (await yard.admin.get("/metrics")).text
    assert 'rollyard_weight_updates_total{state="Succeeded"} 1.0' in metrics
    assert "rollyard_weight_update_paused_seconds_count 2.0" in metrics


async def test_refused_weights_are_taken_back(
    yard: Any, engines: list[Engine], other: Path, references: Any
) -> None:
    assert (await update(yard.admin, "v1", MODEL, reference=references["first"]))["state"] == "Succeeded"
    done = await update(yard.admin, "v2", other, reference=references["first"])
    assert done["state"] == "Failed"
    assert "nats" in done["message"]
    assert "caller" in done["message"]
    assert (await status_of(yard.admin))["policyVersion"] == "v1"
    await until_backends(
        yard.admin, lambda found: all((b["weights"], b["policyVersion"]) == ("Current", "v1") for b in found)
    )
    for engine in engines:
        assert (engine.label(), engine.paused()) == ("v1", False)
        assert engine.logprobs() == pytest.approx(references["first"]["logprobs"], abs=1e-4)


async def test_refused_first_weights_are_taken_back_without_a_restart(
    yard: Any, engines: list[Engine], other: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers are compared with what they gave themselves before, even if the reference is wrong."""
    steps: dict[VllmWeights, list[str]] = defaultdict(list)
    for name in ("reload", "reset_prefix_cache", "resume"):
        call = getattr(VllmWeights, name)

        async def noted(self: VllmWeights, *args: Any, name: str = name, call: Any = call) -> Any:
            steps[self].append(name)
            return await call(self, *args)

        monkeypatch.setattr(VllmWeights, name, noted)
    pids = [engine.popen.pid for engine in engines]
    wrong = references["other"] | {"logprobs": [value - 1.0 for value in references["other"]["logprobs"]]}
    done = await update(yard.admin, "v1", other, reference=wrong)
    assert done["state"] == "Failed"

    async def back() -> bool:
        found = await backends_of(yard.admin)
        assert not any(b["restartRequested"] for b in found), found
        return all(b["weights"] == "Current" and b["policyVersion"] == "0" for b in found)

    await eventually(back)
    assert [engine.popen.pid for engine in engines] == pids
    reloads = [each[each.index("reload") :][:3] for each in steps.values() if "reload" in each]
    assert reloads, steps
    assert all(each == ["reload", "reset_prefix_cache", "resume"] for each in reloads)
    for engine in engines:
        assert (engine.label(), engine.paused()) == ("0", False)
        assert engine.logprobs() == pytest.approx(references["first"]["logprobs"], abs=1e-4)
    assert (await status_of(yard.admin))["policyVersion"] == ""
    text = (await yard.admin.get("/v1/backendpools/p/weights")).text
    assert "before" not in text, "what the servers gave earlier is not shown"


async def test_refused_first_weights_need_a_restart_where_they_cannot_be_loaded_again(
    yard: Any, engines: list[Engine], other: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nowhere(self: VllmWeights) -> str | None:
        return None

    monkeypatch.setattr(VllmWeights, "folder", nowhere)
    done = await update(yard.admin, "v1", other, reference=references["first"])
    assert done["state"] == "Failed"
    await until_backends(yard.admin, lambda found: all(b["restartRequested"] for b in found))
    found = await backends_of(yard.admin)
    assert {b["weights"] for b in found} == {"Failed"}
    assert all("restart it" in b["message"] for b in found)
    assert all(engine.paused() for engine in engines)
    for engine in engines:
        engine.kill()
        engine.start()
    await until_backends(
        yard.admin, lambda found: all(b["weights"] == "Current" and b["ready"] for b in found)
    )
    assert not any(engine.paused() for engine in engines)
    assert (await status_of(yard.admin))["policyVersion"] == ""


async def test_half_updated_pool_is_healed_when_the_server_is_back(
    yard: Any, engines: list[Engine], other: Path, references: Any
) -> None:
    engines[1].kill()
    await until_backends(yard.admin, lambda found: not found[1]["ready"])
    answer = await post(yard.admin, "v1", {"checkpoint": {"path": str(other)}}, reference=references["other"])
    number = answer.json()["id"]
    await until_backends(yard.admin, lambda found: [b["weights"] for b in found] == ["Current", "Stale"])
    assert (await yard.admin.get(f"/v1/backendpools/p/weights/{number}")).json()["state"] == "Running"
    engines[1].start()
    done = (await yard.admin.get(f"/v1/backendpools/p/weights/{number}", params={"wait": 30})).json()
    assert (done["state"], done["verified"]) == ("Succeeded", True)
    # A server that is restarted later gets the pool's weights by itself.
    engines[0].kill()
    engines[0].start()
    await until_backends(
        yard.admin, lambda found: found[0]["weights"] == "Current" and engines[0].label() == "v1"
    )
    assert engines[0].logprobs() == pytest.approx(references["other"]["logprobs"], abs=1e-4)


async def test_pushed_weights_on_a_paused_pool(
    yard: Any, engines: list[Engine], other: Path, references: Any
) -> None:
    answer = await yard.admin.post("/v1/backendpools/p/pause", params={"mode": "wait"})
    assert (answer.status_code, answer.json()["status"]["paused"]) == (200, True)
    assert all(engine.paused() for engine in engines)
    for engine in engines:
        engine.push(other)
    answer = await post(yard.admin, "v1", {"pushed": True}, reference=references["other"])
    done = (
        await yard.admin.get(f"/v1/backendpools/p/weights/{answer.json()['id']}", params={"wait": 30})
    ).json()
    assert (done["state"], done["verified"]) == ("Succeeded", True)
    status = await status_of(yard.admin)
    assert not status["paused"]
    assert [(e.label(), e.paused()) for e in engines] == [("v1", False)] * 2
    # Pushed weights cannot be loaded again, so the server stays out until the trainer pushes them again.
    engines[0].kill()
    engines[0].start()
    await until_backends(
        yard.admin, lambda found: found[0]["weights"] == "Stale" and "push them again" in found[0]["message"]
    )


async def test_pause_and_resume(yard: Any, engines: list[Engine]) -> None:
    assert (await yard.admin.post("/v1/backendpools/p/pause")).status_code == 200
    assert all(engine.paused() for engine in engines)
    answer = await yard.admin.post("/v1/backendpools/p/resume")
    assert (answer.status_code, answer.json()["status"]["paused"]) == (200, False)
    assert not any(engine.paused() for engine in engines)
    assert {b["weights"] for b in answer.json()["status"]["backends"]} == {"Current"}
    assert (await yard.admin.post("/v1/backendpools/nope/pause")).status_code == 404
    assert (await yard.admin.post("/v1/backendpools/p/pause", params={"mode": "now"})).status_code == 422


async def test_a_control_plane_killed_between_pausing_and_resuming(
    settings: Settings, engines: list[Engine]
) -> None:
    """The pool stays paused over a restart, and its servers continue once it is resumed."""
    async with serving(settings) as served:
        await make_pool(served.admin, [engine.url for engine in engines])
        assert (await served.admin.post("/v1/backendpools/p/pause")).status_code == 200
    async with serving(settings) as served:
        assert (await status_of(served.admin))["paused"]
        assert all(engine.paused() for engine in engines)
        assert (await served.admin.post("/v1/backendpools/p/resume")).status_code == 200
        assert not any(engine.paused() for engine in engines)
