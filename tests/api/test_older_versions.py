"""A database, workers, drivers and trainers of an older release keep working with the control plane of today.

`older/README.md` says what was recorded, and by which code.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from rollyard_api.settings import Settings
from rollyard_api.storage.schema import metadata, rollouts
from rollyard_crds.rolloutjob import RolloutJob
from rollyard_crds.trajectory import Trajectory

OLDER = Path(__file__).with_name("older")
_TIMES = ("_at", "_expires", "since")
_NEW_HERE = frozenset({"id", "uid", "etag"})


@pytest.fixture
def recorded() -> dict[str, Any]:
    """Return the older release's tokens and exchanges."""
    found: dict[str, Any] = json.loads((OLDER / "requests.json").read_text())
    return found


@pytest.fixture
def older(tmp_path: Path, recorded: dict[str, Any]) -> Settings:
    """Return the state folder of an older control plane that was stopped a moment ago."""
    database = sqlite3.connect(tmp_path / "rollyard.db")
    database.executescript((OLDER / "database.sql").read_text())
    (newest,) = database.execute("SELECT max(since) FROM rollouts").fetchone()
    there = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table in metadata.sorted_tables:
        if table.name not in there:
            continue  # A later migration makes the table.
        for column in table.columns:
            # The leases of the recording would have run out long ago.
            if isinstance(column.type, sa.Double) and column.name.endswith(_TIMES):
                sql = f"UPDATE {table.name} SET {column.name} = {column.name} + ?"
                database.execute(sql, (time.time() - newest,))
    database.commit()
    database.close()
    shutil.copytree(OLDER / "trajectories", tmp_path / "trajectories")
    tokens = {role: token for role, token in recorded["tokens"].items() if role != "job"}
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    never = 3600.0
    return Settings(
        state_dir=tmp_path,
        sweep_seconds=never,
        health_seconds=never,
        circuit_seconds=never,
        stats_seconds=never,
        speeds_seconds=never,
        recheck_seconds=never,
    )


def shape_problems(before: Any, after: Any, where: str) -> list[str]:
    """Return what a reader of the older answer would miss in today's: a member, its type, or an item of a
    list.
    """
    if isinstance(before, dict):
        if not isinstance(after, dict):
            return [f"{where}: is no object"]
        missing = [f"{where}.{name}: is missing" for name in before.keys() - after.keys()]
        both = before.keys() & after.keys()
        return missing + [
            p for name in both for p in shape_problems(before[name], after[name], f"{where}.{name}")
        ]
    if isinstance(before, list):
        if not isinstance(after, list) or len(before) != len(after):
            return [f"{where}: is no list of {len(before)} items"]
        return [
            p
            for place, (one, other) in enumerate(zip(before, after, strict=True))
            for p in shape_problems(one, other, f"{where}[{place}]")
        ]
    kinds = (int, float) if type(before) in (int, float) else (type(before),)
    return [] if type(after) in kinds else [f"{where}: was {before!r} and is {after!r}"]


def documents(content_type: str, text: str) -> list[Any]:
    """Return the JSON documents of an answer."""
    if not text:
        return []
    if "ndjson" in content_type:
        return [json.loads(line) for line in text.splitlines()]
    return [json.loads(text)] if "json" in content_type else []


async def replay(http: httpx.AsyncClient, recorded: dict[str, Any]) -> None:
    """Send every recorded request again and compare the answers.

    The random names of claims and jobs that the replay creates differ from the recorded ones, so they are
    replaced in the requests that follow.
    """
    renamed: dict[str, str] = {}

    def of_today(text: str) -> str:
        for old, new in renamed.items():
            text = text.replace(old, new)
        return text

    for number, exchange in enumerate(recorded["exchanges"]):
        where = f"{number}: {exchange['method']} {exchange['path']}"
        headers = {k: v for k, v in exchange["headers"].items() if k != "content-length"}
        headers["Authorization"] = f"Bearer {recorded['tokens'][exchange['caller']]}"
        answer = await http.request(
            exchange["method"],
            of_today(exchange["path"]),
            content=of_today(exchange["body"]),
            headers=headers,
        )
        assert answer.status_code == exchange["status"], (where, answer.text)
        for name, value in exchange["answer_headers"].items():
            assert name in answer.headers, (where, name)
            if name == "content-type":
                assert answer.headers[name] == value, where
        if exchange["method"] == "HEAD":
            continue
        if exchange["answer"] is None:
            assert answer.content[:4] == b"PAR1", where
            continue
        content_type = exchange["answer_headers"].get("content-type", "")
        before, after = (documents(content_type, text) for text in (exchange["answer"], answer.text))
        assert shape_problems(before, after, where) == []
        for one, other in zip(before, after, strict=True):
            renamed |= names(one, other)
        assert decisions(of_today(exchange["answer"])) == decisions(answer.text), where


def names(before: Any, after: Any) -> dict[str, str]:
    """Return the random names of an answer, with those that were given in their place."""
    found = {}
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            if name in _NEW_HERE and isinstance(value, str) and value != after[name]:
                found[value] = after[name]
                if name == "uid":
                    found[f"-{value[:8]}-"] = f"-{after[name][:8]}-"  # It is part of the names of rollouts.
            else:
                found |= names(value, after[name])
    elif isinstance(before, list) and isinstance(after, list):
        for one, other in zip(before, after, strict=True):
            found |= names(one, other)
    return found


def decisions(text: str) -> list[Any]:
    """Return what the control plane decides in an answer: rollouts it leases, and verdicts on reports."""
    if not text.startswith("{"):
        return []
    document = json.loads(text.splitlines()[0])
    leases = [(one["rollout"], one["token"], one["stage"]) for one in document.get("leases", [])]
    judged = [(one["rollout"], one["outcome"]) for one in document.get("outcomes", [])]
    # Orphans are in the order of their names, some of which are random.
    orphans = None if document.get("orphans") is None else sorted(document["orphans"])
    stated = [document.get(name) for name in ("draining", "lost", "cancelled", "state")]
    return [*leases, *judged, *stated, orphans]


async def test_older_workers_drivers_and_trainers_bring_an_older_database_to_its_end(
    older: Settings, recorded: dict[str, Any], serving: Callable[..., Any]
) -> None:
    async with serving(older) as served:
        await replay(served.anonymous, recorded)
        for name, ended in (
            ("batch", {"succeeded": 6}),
            ("stream", {"succeeded": 3}),
            ("doomed", {"cancelled": 1}),
        ):
            job = RolloutJob.model_validate((await served.admin.get(f"/v1/rolloutjobs/{name}")).json())
            counts = job.status.counts.model_dump()
            assert {status: counts[status] for status in ended} == ended
            assert counts["total"] == sum(ended.values())


async def test_workers_of_today_bring_an_older_database_to_its_end(
    older: Settings, serving: Callable[..., Any], worker_of: Any
) -> None:
    """None of the older records, leases, claims, uploads and weights is lost or counted twice."""
    async with serving(older) as served:
        before = (await served.admin.get("/v1/rolloutjobs/batch/trajectories")).text.splitlines()
        assert len(before) == 1
        pool = (await served.admin.get("/v1/backendpools/p")).json()["status"]
        assert pool["policyVersion"] == "v1"
        assert [one["weights"] for one in pool["backends"]] == ["Current"]
        claims = (await served.driver.get("/v1/claims")).json()["claims"]
        # The first claim's rollout has ended, so the first sweep, which runs beside this, releases it.
        assert sorted(claim["state"] for claim in claims) in (["Bound", "Pending"], ["Pending", "Released"])
        digest = json.loads((await served.admin.get("/v1/rolloutjobs/batch")).text)["spec"]["tasks"]["url"]
        blob = await served.admin.head(f"/v1/blobs/{digest.rpartition(':')[2]}")
        assert blob.is_success

        def leases(conn: sa.Connection) -> list[Any]:
            columns = (rollouts.c.id, rollouts.c.token, rollouts.c.state)
            return list(conn.execute(sa.select(*columns).where(rollouts.c.lease_expires.is_not(None))))

        held = await served.plane.database.read(leases)
        assert sorted(row.state.stage for row in held) == ["eval", "init", "run"]
        worker = worker_of(served.worker)
        beat = await worker.heartbeat(*({"rollout": row.id, "token": row.token} for row in held))
        assert (beat["lost"], beat["cancelled"]) == ([], [])
        for row in held:
            lease = {"rollout": row.id, "token": row.token, "stage": row.state.stage}
            assert await worker.fail(lease, "Drained", counts=False) == "accepted"

        assert (await served.admin.patch("/v1/rolloutjobs/doomed", json={"suspend": False})).is_success
        assert (await served.admin.post("/v1/rolloutjobs/stream/close")).is_success
        assert await worker.finish_all() == 5 + 2 + 1
        records = (await served.admin.get("/v1/rolloutjobs/batch/trajectories")).text.splitlines()
        assert records[0] == before[0]
        found = [Trajectory.model_validate_json(line) for line in records]
        assert len({one.id for one in found}) == len(found) == 6
        assert {(one.status, one.reward) for one in found} == {("succeeded", 1.0)}
