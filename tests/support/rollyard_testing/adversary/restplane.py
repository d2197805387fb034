"""A control plane in this process with two tenants' jobs, and clients that bear any token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rollyard_api.app import build
from rollyard_api.service import ControlPlane
from rollyard_api.settings import Settings
from rollyard_crds.security.job_token import job_token

from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

RARELY = 3600.0


@dataclass(slots=True)
class Yard:
    """The application, and what tests do to it."""

    app: Any
    plane: ControlPlane
    stack: AsyncExitStack
    uids: dict[str, str] = field(default_factory=dict)
    """The uids of jobs, by name."""

    def client(self, token: str | None) -> httpx.AsyncClient:
        """Return a client with this token."""
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        made = httpx.AsyncClient(
            transport=transport, base_url="http://test", headers=headers, timeout=patience(70)
        )
        self.stack.push_async_callback(made.aclose)
        return made

    @property
    def admin(self) -> httpx.AsyncClient:
        return self.client(self.plane.tokens.current("admin"))

    @property
    def worker(self) -> httpx.AsyncClient:
        return self.client(self.plane.tokens.current("worker"))

    def job_token(self, name: str, uid: str | None = None) -> str:
        """Return the token of the workers of a job, by its name."""
        return job_token(self.plane.tokens.current("worker"), "default", name, uid or self.uids[name])

    async def submit(self, name: str, tasks: int = 1, **spec: Any) -> str:
        """Make a job that needs no model, and return its uid."""
        inline = [{"id": f"t{i}", "prompt": "p"} for i in range(tasks)]
        body = {"tasks": {"inline": inline}, "handler": "shell", "agent": {"type": "oracle"}, **spec}
        manifest = job_manifest(name, body)
        answer = await self.admin.post("/v1/rolloutjobs", json=manifest)
        assert answer.status_code == 201, answer.text
        uid: str = answer.json()["metadata"]["uid"]
        self.uids[name] = uid
        return uid

    async def lease(self, http: httpx.AsyncClient, job: str, **capacity: int) -> list[dict[str, Any]]:
        """Lease rollouts of a job, and return the leases."""
        body = {"worker": f"w-{job}", "node": f"n-{job}", "capacity": capacity, "job": job}
        answer = await http.post("/v1/leases", json=body)
        assert answer.status_code == 200, answer.text
        leases: list[dict[str, Any]] = answer.json()["leases"]
        return leases


def result(lease: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the StageResult of an Init or an Eval."""
    item = {k: lease[k] for k in ("rollout", "token", "stage")}
    if lease["stage"] == "init":
        name = f"sb-{lease['rollout']}-{lease['token']}"
        item["sandbox"] = {"provider": "process", "id": name, "node": "n", "address": "unix:/nowhere"}
    else:
        item["reward"] = 1.0
    return item | fields


@asynccontextmanager
async def control_plane(folder: Path, **changes: Any) -> AsyncIterator[Yard]:
    """Yield a control plane on SQLite, whose background work is left to the tests."""
    given = {
        "sweep_seconds": RARELY,
        "health_seconds": RARELY,
        "circuit_seconds": RARELY,
        "stats_seconds": RARELY,
        # The clients below call the control plane `test`.
        "allowed_hosts": ("test",),
        **changes,
    }
    app = build(Settings(state_dir=folder, **given))
    async with app.router.lifespan_context(app), AsyncExitStack() as stack:
        yield Yard(app, app.state.plane, stack)
