"""A control plane in this process or in one of its own, its clients, and a worker's calls."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
from rollyard_api.app import build
from rollyard_api.core.wakeups import BACKENDS
from rollyard_api.service import ControlPlane
from rollyard_api.settings import Settings
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.schema import backends

from rollyard_testing.crds.segments import reported
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

START_SECONDS = patience(90.0)


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
            polled = {topic: waits for topic, waits in self.plane.bus._waiting.items() if topic != BACKENDS}
            waits = itertools.chain(*polled.values())
            return sum(bool(wait._callbacks) for wait in waits) >= polls

        await eventually(there)

    async def until_stored(self) -> None:
        """Wait until the records of all rollouts that have ended are in the trajectory store."""

        async def stored() -> bool:
            return await self.plane.archive.unstored() == 0

        await eventually(stored)

    async def later(self, seconds: float, operation: Callable[[Transaction], Any]) -> Any:
        """Run an operation as if so many seconds had passed, and return what it returns."""

        def op(tx: Transaction) -> Any:
            tx.now += seconds
            return operation(tx)

        return await self.plane.database.write(op)

    async def submit(self, name: str = "job", **spec: Any) -> None:
        """Submit a new job of `make_manifest`."""
        answer = await self.admin.post("/v1/rolloutjobs", json=make_manifest(name, **spec))
        assert answer.status_code == 201, answer.text

    async def report_backends(self, *urls: str, pool: str = "pool", ready: bool = True) -> None:
        """Report the backends of a pool as its driver does. They have been asked for their sizes then."""
        body = {"backends": [{"url": url, "ready": ready} for url in urls]}
        answer = await self.driver.put(f"/v1/backendpools/{pool}/backends", json=body)
        assert answer.status_code == 200, answer.text

        async def asked() -> bool:
            query = sa.select(backends.c.url).where(backends.c.ready, backends.c.places.is_(None))
            return not await self.plane.database.read(lambda conn: conn.execute(query).all())

        await eventually(asked)

    async def counts(self, name: str = "job") -> dict[str, Any]:
        """Return the counts of a job's status."""
        counts: dict[str, Any] = (await self.admin.get(f"/v1/rolloutjobs/{name}")).json()["status"]["counts"]
        return counts


async def read_pages(http: httpx.AsyncClient, path: str, **query: Any) -> AsyncIterator[httpx.Response]:
    """Yield the pages of results of a path, of which the last one says that it is the last."""
    cursor, finished = "", False
    while not finished:
        page = await http.get(path, params={"cursor": cursor, **query})
        assert page.status_code == 200, page.text
        yield page
        cursor, finished = page.headers["rollyard-cursor"], page.headers["rollyard-finished"] == "true"


async def listed(http: httpx.AsyncClient, path: str, **query: Any) -> list[Any]:
    """Return the items of all pages of a list."""
    items: list[Any] = []
    after: dict[str, str] | None = {}
    while after is not None:
        page = await http.get(path, params={**query, **after})
        assert page.status_code == 200, page.text
        assert page.json()["items"] or not after, "a page makes progress"
        items += page.json()["items"]
        more = page.json()["metadata"].get("continue")
        after = {"continue": more} if more else None
    return items


@asynccontextmanager
async def serving(settings: Settings, **changes: Any) -> AsyncIterator[Served]:
    """Run the application in this event loop, with settings of which some are changed."""
    app = build(settings.model_copy(update=changes))
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
def start_api(folder: Path, *arguments: str, port: int = 0) -> Iterator[Process]:
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


def refused_start(folder: Path, *arguments: str) -> str:
    """Return the last line with which a control plane of a folder refuses to start."""
    command = [sys.executable, "-m", "rollyard_api", "--state-dir", str(folder), "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent, timeout=patience(120))
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]


def make_manifest(name: str = "job", **spec: Any) -> dict[str, Any]:
    """Return a small job that needs no model. Fields of the spec may be given."""
    tasks = {"inline": [{"id": "t0", "prompt": "p"}, {"id": "t1", "prompt": "p"}]}
    body: dict[str, Any] = {"tasks": tasks, "handler": "shell", "agent": {"type": "oracle"}, **spec}
    return job_manifest(name, body)


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
        return await self._lease(capacity, wait, job)

    async def _lease(
        self, capacity: dict[str, int], wait: float = 0.0, job: str | None = None
    ) -> list[dict[str, Any]]:
        body = {"worker": self.name, "node": self.node, "capacity": capacity, "wait": wait, "job": job}
        answer = await self.http.post("/v1/leases", json=body)
        assert answer.status_code == 200, answer.text
        leases: list[dict[str, Any]] = answer.json()["leases"]
        return leases

    async def reach(self, stage: str, count: int = 1) -> list[dict[str, Any]]:
        """Take up to so many rollouts from Init to a later stage, and return their leases of it."""
        for before in ("init", "run")[: 1 if stage == "run" else 2]:
            leases = await self._lease({before: count})
            assert set(await self.complete(*map(self.result, leases))) == {"accepted"}
        return await self._lease({stage: count})

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
