"""Fixtures of a control plane in this process, on SQLite and on PostgreSQL, and in a process of its own."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_api.app import build
from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.service import ControlPlane
from rollyard_api.settings import Settings
from rollyard_inference.transports.with_httpx import HttpxTransport
from rollyard_testing.api.databases import (
    fresh_postgres,
    migrated_database,
    migrated_postgres,
    migrated_sqlite,
    postgres,
)
from rollyard_testing.api.weights import Pools
from rollyard_testing.crds.segments import reported
from rollyard_testing.inference.misbehaving import MisbehavingServer
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

__all__ = ["fresh_postgres", "migrated_postgres", "migrated_sqlite", "postgres"]

START_SECONDS = patience(90.0)
OF_DIALECTS = re.compile(
    "test_(claims|dynamic_sampling|leases|pools|prorl|registration|replicas|schema|uploads|view_rollouts|weights"
    "|worker_deaths)"
)
"""The files whose SQL depends on the dialect, such as locks, upserts, JSON and large objects."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other files on PostgreSQL to the night: they show the same there as on SQLite."""
    for item in items:
        if item.get_closest_marker("postgresql") and not OF_DIALECTS.fullmatch(item.path.stem):
            item.add_marker(pytest.mark.nightly)


@dataclass(slots=True)
class Served:
    """A control plane in this process and HTTP clients of it, one per role."""

    plane: ControlPlane
    admin: httpx.AsyncClient
    worker: httpx.AsyncClient
    driver: httpx.AsyncClient
    viewer: httpx.AsyncClient
    anonymous: httpx.AsyncClient

    async def until_waiting(self, polls: int = 1) -> None:
        """Wait until so many long polls have found nothing, and are to be woken."""

        async def there() -> bool:
            waits = itertools.chain(*self.plane.bus._waiting.values())
            return sum(bool(wait._callbacks) for wait in waits) >= polls

        await eventually(there)


@asynccontextmanager
async def serve(settings: Settings) -> AsyncIterator[Served]:
    """Run the application in this event loop."""
    app = build(settings)
    async with app.router.lifespan_context(app):
        plane: ControlPlane = app.state.plane
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)

        def client(token: str | None) -> httpx.AsyncClient:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            return httpx.AsyncClient(
                transport=transport, base_url="http://test", headers=headers, timeout=patience(70)
            )

        tokens = plane.tokens
        roles = (
            tokens.current("admin"),
            tokens.current("worker"),
            tokens.current("driver"),
            tokens.by_role.get("viewer", ("",))[0],
            None,
        )
        served = Served(plane, *map(client, roles))
        try:
            yield served
        finally:
            for one in (served.admin, served.worker, served.driver, served.viewer, served.anonymous):
                await one.aclose()


Serve = Callable[..., Any]


def quiet_settings(state_dir: Path, db: str, **more: Any) -> Settings:
    """Return settings with which a control plane sweeps and looks after servers only when it is asked to."""
    return Settings(
        state_dir=state_dir,
        db=db,
        sweep_seconds=3600.0,
        health_seconds=3600.0,
        circuit_seconds=3600.0,
        stats_seconds=3600.0,
        **more,
    )


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Return settings with a new database of each kind. The tests call the sweeper themselves.

    Those on PostgreSQL are a part of their own.
    """
    return quiet_settings(
        tmp_path,
        migrated_database(request, request.param, tmp_path),
        speeds_seconds=3600.0,
        fleet_seconds=0.0,
        folding_seconds=3600.0,
        recheck_seconds=0.2,
    )


@pytest.fixture
async def served(settings: Settings) -> AsyncIterator[Served]:
    """Yield a control plane on each kind of database."""
    async with serve(settings) as made:
        yield made


@pytest.fixture
def serving() -> Serve:
    """Return a starter of a control plane with settings: `async with serving(settings, **changes)`."""

    def make(settings: Settings, **changes: Any) -> Any:
        return serve(replace(settings, **changes))

    return make


@dataclass(slots=True)
class Process:
    """A `python -m rollyard_api` process and its address."""

    popen: subprocess.Popen[bytes]
    url: str
    tokens: dict[str, str]
    folder: Path

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self.popen.kill()
        self.popen.wait(patience(10))


@contextmanager
def api_process(folder: Path, *arguments: str, port: int = 0) -> Iterator[Process]:
    """Yield a control plane in a process of its own that is ready.

    At the end it is killed.
    """
    port_file = folder / "port"
    port_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "rollyard_api", "--state-dir", str(folder), "--port", str(port)]
    with (folder / "api.log").open("ab") as log:
        popen = subprocess.Popen(
            [*command, "--port-file", str(port_file), *arguments], stdout=log, stderr=log, cwd=folder
        )
    try:
        end = time.monotonic() + START_SECONDS
        while not port_file.exists():
            if popen.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"it did not start: {(folder / 'api.log').read_text()[-2000:]}")
            time.sleep(0.02)
        made = folder / "tokens.json"
        tokens = json.loads(made.read_text()) if made.exists() else {}
        yield Process(popen, f"http://127.0.0.1:{port_file.read_text().strip()}", tokens, folder)
    finally:
        if popen.poll() is None:
            popen.kill()
            popen.wait(patience(10))


@pytest.fixture
def start_api() -> Callable[..., Any]:
    """Return a function that starts a control plane process: `with start_api(folder, *arguments)`."""
    return api_process


def manifest(name: str = "job", **spec: Any) -> dict[str, Any]:
    """Return a small job that needs no model. Fields of the spec may be given."""
    tasks = {"inline": [{"id": "t0", "prompt": "p"}, {"id": "t1", "prompt": "p"}]}
    body: dict[str, Any] = {"tasks": tasks, "handler": "shell", "agent": {"type": "oracle"}, **spec}
    return job_manifest(name, body)


@pytest.fixture
def make_manifest() -> Callable[..., dict[str, Any]]:
    return manifest


SEGMENT = {
    "prompt_ids": [1, 2, 3],
    "response_ids": [4, 5, 6],
    "loss_mask": [1, 0, 1],
    "logprobs": [-0.5, 0.0, -1.5],
    "policy_versions": ["v1", "", "v1"],
}


class Worker:
    """The calls of a stage worker, over any HTTP client."""

    def __init__(self, http: httpx.AsyncClient, name: str = "w", node: str = "n") -> None:
        self.http = http
        self.name = name
        self.node = node

    async def lease(self, wait: float = 0.0, job: str | None = None, **capacity: int) -> list[dict[str, Any]]:
        body = {"worker": self.name, "node": self.node, "capacity": capacity, "wait": wait, "job": job}
        answer = await self.http.post("/v1/leases", json=body)
        assert answer.status_code == 200, answer.text
        leases: list[dict[str, Any]] = answer.json()["leases"]
        return leases

    def result(self, lease: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Return the StageResult of a lease, in which a Run's segments stand as records have them."""
        item = {"rollout": lease["rollout"], "token": lease["token"], "stage": lease["stage"]}
        if lease["stage"] == "init":
            item["sandbox"] = {
                "provider": "process",
                "id": f"sb-{lease['rollout']}-{lease['token']}",
                "node": self.node,
                "address": "unix:/nowhere",
            }
        elif lease["stage"] == "run":
            item["trajectory"] = {
                "id": lease["rollout"],
                "job": lease["job"],
                "task_id": lease["task"]["id"],
                "group_id": lease["group_id"],
                "sample_index": lease["sample_index"],
                "segments": [SEGMENT],
            }
        else:
            item["reward"] = 1.0
        return item | fields

    async def complete(self, *results: dict[str, Any]) -> list[str]:
        answer = await self.http.post(
            "/v1/leases/complete", json={"worker": self.name, "results": [reported(one) for one in results]}
        )
        assert answer.status_code == 200, answer.text
        return [item["outcome"] for item in answer.json()["outcomes"]]

    async def fail(self, lease: dict[str, Any], reason: str = "Broken", **fields: Any) -> str:
        (outcome,) = await self.fail_all([lease], reason, **fields)
        return outcome

    async def fail_all(
        self, leases: Sequence[dict[str, Any]], reason: str = "Broken", **fields: Any
    ) -> list[str]:
        """Report the failures of several leases in one request, and return their outcomes."""
        said = {"reason": reason} | fields
        failures = [{k: lease[k] for k in ("rollout", "token", "stage")} | said for lease in leases]
        answer = await self.http.post("/v1/leases/fail", json={"worker": self.name, "failures": failures})
        assert answer.status_code == 200, answer.text
        return [item["outcome"] for item in answer.json()["outcomes"]]

    async def heartbeat(self, *leases: dict[str, Any], sandboxes: list[str] | None = None) -> dict[str, Any]:
        body = {
            "worker": self.name,
            "node": self.node,
            "leases": [{"rollout": one["rollout"], "token": one["token"]} for one in leases],
            "sandboxes": sandboxes or [],
        }
        answer = await self.http.post("/v1/leases/heartbeat", json=body)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def finish_all(self, reward: Callable[[dict[str, Any]], float] = lambda _lease: 1.0) -> int:
        """Take everything through all stages, and return the number of rollouts that got a reward."""
        done = 0
        while leases := await self.lease(init=16, run=16, eval=16):
            results = [
                self.result(one, **({"reward": reward(one)} if one["stage"] == "eval" else {}))
                for one in leases
            ]
            assert set(await self.complete(*results)) == {"accepted"}
            done += sum(one["stage"] == "eval" for one in leases)
        return done


@pytest.fixture
def worker_of() -> type[Worker]:
    return Worker


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., Any]:
    return eventually


@pytest.fixture
async def scripted() -> AsyncIterator[Callable[[], Any]]:
    """Yield a function that starts another scripted server: `await scripted()`."""
    made: list[MisbehavingServer] = []

    async def start() -> MisbehavingServer:
        made.append(await MisbehavingServer().start())
        return made[-1]

    yield start
    for server in made:
        await server.stop()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """Yield the control plane's client towards backends."""
    async with httpx.AsyncClient(timeout=patience(5.0), trust_env=False) as client:
        yield client


@pytest.fixture
def transport(http: httpx.AsyncClient) -> HttpxTransport:
    """Return the transport to backends. A machine that stands still for seconds fails no test."""
    return HttpxTransport(http, connect_seconds=30.0)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a real embedded engine that serves `tiny`.

    It is shared, so no test may pause or change it.
    """
    folder = tmp_path_factory.mktemp("engine")
    port_file = folder / "port"
    model = Path(__file__).parents[2] / "engine/src/rollyard_engine/models/tiny-policy"
    command = [sys.executable, "-m", "rollyard_engine", "--model", str(model), "--served-model-name", "tiny"]
    with (folder / "log").open("wb") as log:
        popen = subprocess.Popen(
            [*command, "--port", "0", "--port-file", str(port_file)], stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + START_SECONDS
        while not port_file.exists():
            if popen.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the engine did not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        popen.kill()
        popen.wait(patience(10))


@pytest.fixture
async def disk() -> AsyncIterator[Bulkhead]:
    """Yield the bulkhead of threads that look into folders of weights."""
    made = Bulkhead("folders of weights", threads=2, waiting=8, seconds=20.0)
    yield made
    made.close()


@pytest.fixture
async def two(request: pytest.FixtureRequest, tmp_path: Path, serving: Serve) -> AsyncIterator[Pools]:
    """Yield two pools of a control plane that does nothing to servers by itself.

    They are on SQLite, or on what a test's parameter names.
    """
    db = migrated_database(request, getattr(request, "param", "sqlite"), tmp_path)
    async with serving(quiet_settings(tmp_path, db, weights_seconds=3600.0)) as served:
        made = Pools(served)
        await made.make()
        yield made
