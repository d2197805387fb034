"""Fixtures of a control plane in this process, on SQLite and on PostgreSQL, and in a process of its own."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.settings import Settings
from rollyard_inference.transports.with_httpx import HttpxTransport
from rollyard_testing.api.databases import (
    fresh_postgres,
    migrated_database,
    migrated_postgres,
    migrated_sqlite,
    postgres,
)
from rollyard_testing.api.plane import START_SECONDS, Served, Worker, quiet_settings, serving
from rollyard_testing.api.weights import Pools
from rollyard_testing.inference.misbehaving import MisbehavingServer
from rollyard_testing.pace import patience

__all__ = ["fresh_postgres", "migrated_postgres", "migrated_sqlite", "postgres"]

OF_DIALECTS = re.compile(
    "test_(claims|dynamic_sampling|harness_quota|leases|pools|prorl|registration|replicas|schema|uploads|view_rollouts|weights"
    "|worker_deaths)"
)
"""The files whose SQL depends on the dialect, such as locks, upserts, JSON and large objects."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other files on PostgreSQL to the night: they show the same there as on SQLite."""
    for item in items:
        if item.get_closest_marker("postgresql") and not OF_DIALECTS.fullmatch(item.path.stem):
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer at once that a host is unknown: a name server whose answer is lost costs five seconds.

    Backends of these tests have names, such as `http://a`, that no name server knows.
    """
    look_up = socket.getaddrinfo

    def answer(host: Any, *args: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name is None or name == "localhost" or not name.strip("0123456789.") or ":" in name:
            return look_up(host, *args, **options)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", answer)


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
    async with serving(settings) as made:
        yield made


@pytest.fixture
async def worker(served: Served) -> Worker:
    """Return a worker of a control plane whose only job has one rollout."""
    await served.submit(tasks={"inline": [{"id": "t0", "prompt": "p"}]})
    return Worker(served.worker)


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
async def two(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pools]:
    """Yield two pools of a control plane that does nothing to servers by itself.

    They are on SQLite, or on what a test's parameter names.
    """
    db = migrated_database(request, getattr(request, "param", "sqlite"), tmp_path)
    async with serving(quiet_settings(tmp_path, db, weights_seconds=3600.0)) as served:
        made = Pools(served)
        await made.make()
        yield made
