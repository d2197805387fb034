"""Weight updates through failures: a control plane killed at any step, and servers that misbehave."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from rollyard_api.core.problems import Invalid
from rollyard_api.rollouts import staleness
from rollyard_api.settings import Settings
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.schema import backends, pools
from rollyard_api.weights import checkpoints
from rollyard_api.weights.coordinator import UpdateLimits
from rollyard_crds.weights import WeightSource
from rollyard_testing.api.databases import migrated_database
from rollyard_testing.api.plane import Worker, make_manifest, serving, start_api
from rollyard_testing.api.weights import backends_of, until_backends
from rollyard_testing.inference.scripted import LOGPROB, REFERENCE, SHAPES, Scripted, Step
from rollyard_testing.manifests import pool_manifest
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually


@pytest.fixture(params=["vllm", pytest.param("sglang", marks=pytest.mark.nightly)])
def shape(request: pytest.FixtureRequest) -> str:
    """Return whose calls the servers speak."""
    name: str = request.param
    return name


@pytest.fixture
def servers(shape: str) -> Iterator[list[Scripted]]:
    made = [SHAPES[shape]() for _ in range(2)]
    yield made
    for server in made:
        server.close()


def write_safetensors(file: Path, missing: int = 0) -> None:
    """Write a safetensors file with one tensor of 64 bytes, without its last `missing` bytes."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64 - missing))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_safetensors(folder / "model.safetensors")
    return folder


def pool_of(urls: list[str]) -> dict[str, Any]:
    return pool_manifest("p", {"model": "tiny", "engine": {"type": "external", "external": {"urls": urls}}})


async def made(admin: httpx.AsyncClient, urls: list[str]) -> None:
    assert (await admin.post("/v1/backendpools", json=pool_of(urls))).status_code == 201
    await until_backends(admin, lambda found: all(b["ready"] for b in found))


async def post(
    admin: httpx.AsyncClient, checkpoint: Path, version: str = "v1", **fields: Any
) -> httpx.Response:
    body = {
        "policyVersion": version,
        "source": {"checkpoint": {"path": str(checkpoint)}},
        "reference": REFERENCE,
        **fields,
    }
    return await admin.post("/v1/backendpools/p/weights", json=body)


async def ended(admin: httpx.AsyncClient, number: int, wait: float = 40.0) -> dict[str, Any]:
    answer = await admin.get(f"/v1/backendpools/p/weights/{number}", params={"wait": wait})
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Return settings on SQLite, or on what a test's parameter names.

    The tests call the sweeper themselves.
    """
    return Settings(
        state_dir=tmp_path,
        db=migrated_database(request, getattr(request, "param", "sqlite"), tmp_path),
        sweep_seconds=3600.0,
        circuit_seconds=3600.0,
        stats_seconds=3600.0,
        recheck_seconds=0.2,
    )


def quick(settings: Settings, **limits: float) -> dict[str, Any]:
    return {"health_seconds": 0.2, "weights_seconds": 0.05, "weight_limits": UpdateLimits(look=0.2, **limits)}


STEPS: tuple[Step, ...] = ("measure", "pause", "load", "label", "resume", "compare")


@pytest.mark.faults
async def test_kill_9_of_the_control_plane_at_each_step(
    tmp_path: Path, servers: list[Scripted], checkpoint: Path
) -> None:
    """Updates follow each other, each killed while both servers are at another step of it.

    The successor ends the interrupted update, and begins the next.
    """
    folder = tmp_path / "state"
    folder.mkdir()
    number = None
    for version, step in enumerate((*STEPS, None)):
        with start_api(folder) as process:
            headers = {"Authorization": f"Bearer {process.tokens['admin']}"}
            async with httpx.AsyncClient(base_url=process.url, headers=headers, timeout=patience(70)) as http:
                if number is None:
                    await made(http, [server.url for server in servers])
                else:
                    done = await ended(http, number)
                    assert (done["state"], done["verified"]) == ("Succeeded", True), done
                    found = await backends_of(http)
                    label = f"v{version - 1}"
                    assert {(b["weights"], b["policyVersion"]) for b in found} == {("Current", label)}
                    assert [(s.label, s.weights, s.paused) for s in servers] == [(label, "new", False)] * 2
                if step is None:
                    return
                for server in servers:
                    server.seen.clear()
                    server.weights = "old"
                    server.gates[server.paths[step]] = threading.Event()
                number = (await post(http, checkpoint, f"v{version}")).json()["id"]

                async def reached(step: Step = step) -> bool:
                    return all(server.paths[step] in server.seen for server in servers)

                await eventually(reached)
                process.kill()
        for server in servers:
            server.gates.pop(server.paths[step]).set()


async def test_nothing_is_sampled_with_what_old_weights_have_computed(
    settings: Settings, servers: list[Scripted], checkpoint: Path
) -> None:
    """The prefix cache is emptied after the weights are loaded and before anything is sampled again."""
    async with serving(settings, **quick(settings)) as served:
        await made(served.admin, [server.url for server in servers])
        for server in servers:
            server.seen.clear()
        done = await ended(served.admin, (await post(served.admin, checkpoint)).json()["id"])
        assert (done["state"], done["verified"]) == ("Succeeded", True), done
    order: tuple[Step, ...] = ("measure", "pause", "load", "label", "flush", "resume", "compare", "label")
    for server in servers:
        steps = [server.paths[step] for step in order]
        assert [path for path in server.seen if path in steps] == steps
        labels = [body["new_version"] for path, body in server.bodies if path == server.paths["label"]]
        assert labels == ["unverified:v1", "v1"], "what is sampled until then is marked"


async def test_a_server_that_fails_now_and_then(
    settings: Settings, servers: list[Scripted], checkpoint: Path
) -> None:
    """A reload that fails twice with 500, and a pause that hangs, are tried until they work."""
    async with serving(settings, **quick(settings, pause=0.5)) as served:
        await made(served.admin, [server.url for server in servers])
        servers[0].failing[servers[0].paths["load"]] = 2
        servers[1].gates[servers[1].paths["pause"]] = threading.Event()
        number = (await post(served.admin, checkpoint)).json()["id"]

        async def hangs() -> bool:
            parts = (await ended(served.admin, number, 0))["backends"]
            return any("no answer within" in part["message"] for part in parts)

        await eventually(hangs)
        assert (await backends_of(served.admin))[1]["weights"] == "Updating"
        servers[1].gates.pop(servers[1].paths["pause"]).set()
        done = await ended(served.admin, number)
        assert (done["state"], done["verified"]) == ("Succeeded", True), done
        assert not any(server.paused for server in servers)


async def test_a_server_that_never_loads_waits_for_its_restart(
    settings: Settings, servers: list[Scripted], checkpoint: Path
) -> None:
    async with serving(settings, **quick(settings)) as served:
        await made(served.admin, [server.url for server in servers])
        servers[0].failing[servers[0].paths["load"]] = 1_000
        number = (await post(served.admin, checkpoint)).json()["id"]
        await until_backends(served.admin, lambda found: found[0]["restartRequested"])
        half = await backends_of(served.admin)
        assert [b["weights"] for b in half] == ["Failed", "Current"]
        assert (await ended(served.admin, number, 0))["state"] == "Running"
        servers[0].failing.clear()
        servers[0].restart()
        done = await ended(served.admin, number)
        assert (done["state"], done["verified"]) == ("Succeeded", True), done
        assert [(s.label, s.weights, s.paused) for s in servers] == [("v1", "new", False)] * 2


async def test_no_server_loads(settings: Settings, servers: list[Scripted], checkpoint: Path) -> None:
    async with serving(settings, **quick(settings)) as served:
        await made(served.admin, [server.url for server in servers])
        for server in servers:
            server.failing[server.paths["load"]] = 1_000
        number = (await post(served.admin, checkpoint)).json()["id"]
        done = await ended(served.admin, number)
        assert done["state"] == "Failed"
        assert "scripted failure" in done["message"]
        assert (await served.admin.get("/v1/backendpools/p")).json()["status"]["policyVersion"] == ""


async def test_one_server_that_keeps_old_weights_fails_the_update(
    shape: str, settings: Settings, servers: list[Scripted], checkpoint: Path
) -> None:
    async with serving(settings, **quick(settings)) as served:
        await made(served.admin, [server.url for server in servers])
        servers[1].stale = True
        done = await ended(served.admin, (await post(served.admin, checkpoint)).json()["id"])
        assert done["state"] == "Failed"
        assert servers[1].url in done["message"]
        assert "1 nats" in done["message"]

        # The first one loads its first folder and still differs from what it was before. The second one is as
        # it was at its start, and is not restarted. SGLang does not say which folder it was started on.
        restarted = servers if shape == "sglang" else servers[:1]

        async def flagged() -> bool:
            found = {b["url"]: b for b in await backends_of(served.admin)}
            return all(
                found[server.url]["restartRequested"]
                if server in restarted
                else found[server.url]["weights"] == "Current"
                for server in servers
            )

        await eventually(flagged)
        for server in servers:
            assert server.paused == (server in restarted), "nothing is sampled with weights that nobody knows"
        for server in restarted:
            server.restart()
        servers[1].stale = False
        await until_backends(served.admin, lambda found: all(b["weights"] == "Current" for b in found))
        done = await ended(served.admin, (await post(served.admin, checkpoint, "v2")).json()["id"])
        assert done["state"] == "Succeeded"


@pytest.mark.parametrize(
    ("config", "tolerance", "state"),
    [
        ({"dtype": "bfloat16"}, None, "Succeeded"),
        ({}, None, "Succeeded"),
        ({"torch_dtype": "float32"}, None, "Failed"),
        ({"dtype": "bfloat16"}, 0.2, "Failed"),
        ({"dtype": "float32"}, 0.4, "Succeeded"),
    ],
)
async def test_the_tolerance_follows_from_the_data_type_unless_it_is_given(
    config: dict[str, Any],
    tolerance: float | None,
    state: str,
    settings: Settings,
    servers: list[Scripted],
    checkpoint: Path,
) -> None:
    """The servers differ from the reference by 0.3 nats, and do not say in which type they compute."""
    (checkpoint / "config.json").write_text(json.dumps(config))
    near: dict[str, Any] = {"promptIds": [1, 2, 3, 4], "logprobs": [LOGPROB["new"] + 0.3] * 3}
    if tolerance is not None:
        near["tolerance"] = tolerance
    async with serving(settings, **quick(settings)) as served:
        await made(served.admin, [server.url for server in servers])
        done = await ended(served.admin, (await post(served.admin, checkpoint, reference=near)).json()["id"])
        assert done["state"] == state, done
        if state == "Failed":
            assert f"{tolerance or 0.1:g} is allowed" in done["message"]


@pytest.mark.parametrize("shape", ["vllm"], indirect=True)
async def test_bad_folders_name_the_field_and_the_file(
    settings: Settings, servers: list[Scripted], checkpoint: Path
) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    async with serving(settings, **quick(settings)) as served:
        await made(served.admin, [server.url for server in servers])

        async def refusal(folder: Path, **fields: Any) -> str:
            answer = await post(served.admin, folder, **fields)
            assert answer.status_code == 422, answer.text
            detail: str = answer.json()["detail"]
            return detail

        assert "source.checkpoint.path" in await refusal(checkpoint.parent / "nowhere")
        write_safetensors(checkpoint / "model.safetensors", missing=5)
        assert "not written to the end" in await refusal(checkpoint)
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        write_safetensors(checkpoint / "model-1.safetensors")
        assert "has no model-2.safetensors" in await refusal(checkpoint)
        write_safetensors(checkpoint / "model-2.safetensors", missing=5)
        assert "model-2.safetensors has" in await refusal(checkpoint)
        (checkpoint / "config.json").unlink()
        assert "has no config.json" in await refusal(checkpoint)
        assert "policyVersion" in await refusal(checkpoint, policyVersion="unverified:v1")
        body = {"policyVersion": "v1", "source": {}}
        answer = await served.admin.post("/v1/backendpools/p/weights", json=body)
        assert (answer.status_code, "source" in answer.json()["detail"]) == (422, True)
        assert (await served.admin.post("/v1/backendpools/q/weights", json=body)).status_code == 422
        body = {"policyVersion": "v1", "source": {"pushed": True}}
        assert (await served.admin.post("/v1/backendpools/q/weights", json=body)).status_code == 404
        assert (await served.worker.post("/v1/backendpools/p/weights", json=body)).status_code == 403
        assert (await served.admin.get("/v1/backendpools/p/weights")).json() == {"items": []}


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_folder_that_only_the_servers_see_is_left_to_them(engine: str, tmp_path: Path) -> None:
    source = WeightSource.model_validate({"checkpoint": {"path": str(tmp_path / "volume")}})
    for urls in ([], ["http://10.0.0.7:8000"]):
        assert "the servers themselves check it" in checkpoints.check(source, urls, engine)
    with pytest.raises(Invalid, match="does not exist on this machine"):
        checkpoints.check(source, ["http://10.0.0.7:8000", "http://127.0.0.1:8000"], engine)


@pytest.mark.parametrize("shape", ["vllm"], indirect=True)
@pytest.mark.parametrize(
    ("settings", "choice", "lag"),
    [("sqlite", "Restart", 0), ("postgresql", "Restart", 0), ("sqlite", "Cancel", 1)],
    indirect=["settings"],
)
async def test_stale_rollouts(
    choice: str, lag: int, settings: Settings, servers: list[Scripted], checkpoint: Path
) -> None:
    """Rollouts beyond maxPolicyLag are returned in Run, before Eval and at completion, once and without an
    attempt.
    """
    async with serving(settings, **quick(settings)) as served:
        await made(served.admin, [server.url for server in servers])
        tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(3)]}
        manifest = make_manifest(
            tasks=tasks,
            backendRef={"name": "p"},
            agent={"type": "tools"},
            maxPolicyLag=lag,
            staleRollouts=choice,
        )
        answer = await served.admin.post("/v1/rolloutjobs", json=manifest)
        assert answer.status_code == 201, answer.text
        worker = Worker(served.worker)
        held = await worker.reach("run", 3)
        assert len(held) == 3
        assert await worker.complete(worker.result(held[0])) == ["accepted"]  # It waits for Eval.
        for number in range(lag):
            early = await post(served.admin, checkpoint, f"v0.{number}")
            assert (await ended(served.admin, early.json()["id"]))["state"] == "Succeeded"
            assert await worker.heartbeat(*held[1:]) == {
                "lost": [],
                "cancelled": [],
                "orphans": [],
                "watched": [],
            }
        done = await ended(served.admin, (await post(served.admin, checkpoint)).json()["id"])
        assert done["state"] == "Succeeded"
        beat = await worker.heartbeat(*held[1:])
        told = beat["lost"] if choice == "Restart" else beat["cancelled"]
        assert len(told) == 2
        assert await worker.complete(worker.result(held[1])) == [
            "stale" if choice == "Restart" else "cancelled"
        ]
        assert await worker.lease(eval=3) == []
        finished = await worker.finish_all()
        assert finished == (3 if choice == "Restart" else 0)
        records = (await served.admin.get("/v1/rolloutjobs/job/trajectories")).text.splitlines()
        outcomes = {(r["status"], r["reason"], r["attempt"]) for r in map(json.loads, records)}
        expected = ("succeeded", "", 0) if choice == "Restart" else ("cancelled", "PolicyTooStale", 0)
        assert (len(records), outcomes) == (3, {expected})
        attempts = [one for record in map(json.loads, records) for one in record.get("attempts", ())]
        explained = sorted(
            (one["stage"], one["attempt"], one["reason"], one["worker"], one["node"], one["counted"])
            for one in attempts
        )
        # One of them waited for its first Eval, so no worker had it, and two were in Run.
        # A rollout that is cancelled never returns to a queue.
        waiting, running = ("eval", 0, "PolicyTooStale", "", "n"), ("run", 1, "PolicyTooStale", "w", "n")
        taken_back = [(*one, False) for one in (waiting, running, running)]
        assert explained == (taken_back if choice == "Restart" else [])
        assert all("maxPolicyLag" in one["message"] and one["seconds"] >= 0 for one in attempts)
        metrics = (await served.admin.get("/metrics")).text
        action = "restarted" if choice == "Restart" else "cancelled"
        assert f'rollyard_stale_rollouts_total{{action="{action}"}} 3.0' in metrics


@pytest.fixture
async def calm(settings: Settings) -> AsyncIterator[Any]:
    """Yield a control plane that leaves the weights of backends to the test."""
    async with serving(settings, weights_seconds=3600.0) as served:
        yield served


async def _updated(served: Any, pool: str, url: str, index: int, weights: str = "Current") -> int:
    """Say that a backend has the weights of an update, and return how many rollouts are too stale then."""

    def op(tx: Transaction) -> int:
        of_pool = sa.select(pools.c.id).where(pools.c.name == pool, pools.c.namespace == "default")
        where = (backends.c.url == url, backends.c.pool_id.in_(of_pool))
        tx.conn.execute(sa.update(backends).where(*where).values(policy_index=index, weights=weights))
        return staleness.enforce(tx, "default", pool)

    count: int = await served.plane.database.write(op)
    return count


async def _on_pools(served: Any, **lags: int | None) -> dict[str, Any]:
    """Bring two rollouts of each job to Run, and return the leases by job.

    The jobs that are called `q...` are on another pool than the rest, and `team` is on one of another
    namespace.
    """
    for name, namespace in (("p", "default"), ("q", "default"), ("p", "team")):
        query = {"namespace": namespace}
        body = {"apiVersion": "rollyard.dev/v1alpha1", "kind": "BackendPool", "metadata": {"name": name}}
        pool = body | {"spec": {"model": "tiny"}}
        assert (await served.admin.post("/v1/backendpools", params=query, json=pool)).status_code == 201
        ready = {"backends": [{"url": f"http://{name}-{n}:8000", "ready": True} for n in range(2)]}
        put = await served.driver.put(f"/v1/backendpools/{name}/backends", params=query, json=ready)
        assert put.status_code == 200, put.text
    for job, lag in lags.items():
        pool = {"name": "q" if job.startswith("q") else "p"}
        manifest = make_manifest(
            job, backendRef=pool, agent={"type": "tools"}, **({} if lag is None else {"maxPolicyLag": lag})
        )
        query = {"namespace": "team" if job == "team" else "default"}
        assert (await served.admin.post("/v1/rolloutjobs", params=query, json=manifest)).status_code == 201
    worker = Worker(served.worker)
    count = 2 * len(lags)
    held: dict[str, Any] = {job: [] for job in lags}
    for lease in await worker.reach("run", count):
        held[lease["job"]].append(lease)
    assert {job: len(leases) for job, leases in held.items()} == dict.fromkeys(lags, 2)
    return held


async def test_each_job_has_a_lag_of_its_own_and_only_updates_of_its_pool_count(calm: Any) -> None:
    """One rollout of each job is in Run, and the other one waits for Eval, or is there already."""
    lags = {"strict": 0, "lenient": 1, "unbounded": None, "q-strict": 0, "team": 0}
    held = await _on_pools(calm, **lags)
    worker = Worker(calm.worker)
    assert set(await worker.complete(*[worker.result(two) for _, two in held.values()])) == {"accepted"}
    (evaluated,) = await worker.lease(eval=1, job="q-strict")

    async def kept() -> set[str]:
        leases = [one for one, _ in held.values()]
        lost = {one["rollout"] for one in (await worker.heartbeat(*leases))["lost"]}
        return {lease["job"] for lease in leases if lease["rollout"] not in lost}

    assert await _updated(calm, "p", "http://p-0:8000", 7, "Updating") == 0, "it does not sample with them"
    assert await _updated(calm, "p", "http://p-0:8000", 0) == 0
    assert await _updated(calm, "p", "http://p-1:8000", 1) == 2, "the newest weights of the pool count"
    assert await kept() == set(lags) - {"strict"}
    assert await _updated(calm, "p", "http://p-1:8000", 2) == 2
    assert await kept() == set(lags) - {"strict", "lenient"}
    assert await _updated(calm, "q", "http://q-0:8000", 1) == 1, "what is in Eval stays there"
    assert await worker.complete(worker.result(evaluated)) == ["accepted"]
    assert await kept() == {"unbounded", "team"}
    assert await worker.heartbeat(*[one for one, _ in (held["unbounded"], held["team"])]) == {
        "lost": [],
        "cancelled": [],
        "orphans": [],
        "watched": [],
    }
    # What waited for Eval of the others begins again, too.
    assert {one["job"] for one in await worker.lease(eval=16)} == {"unbounded", "team"}
    again = await worker.lease(init=16)
    assert sorted(one["job"] for one in again) == ["lenient"] * 2 + ["q-strict"] + ["strict"] * 2


async def test_a_rollout_that_leaves_run_after_too_many_updates_begins_again(calm: Any) -> None:
    """An update that another backend of the pool got while it was in Run is noticed when it is complete."""
    held = await _on_pools(calm, strict=0, lenient=1, unbounded=None, **{"q-strict": 0})
    worker = Worker(calm.worker)

    def update(tx: Transaction) -> None:
        tx.conn.execute(sa.update(pools).where(pools.c.namespace == "default").values(policy_index=1))
        tx.conn.execute(sa.update(backends).where(backends.c.url.like("%-1:8000")).values(policy_index=1))

    await calm.plane.database.write(update)
    results = [worker.result(lease) for leases in held.values() for lease in leases[:1]]
    assert await worker.complete(*results) == ["accepted"] * 4
    assert sorted(one["job"] for one in await worker.lease(eval=16)) == ["lenient", "unbounded"]
    again = await worker.lease(init=16)
    assert sorted(one["job"] for one in again) == ["q-strict"] * 2 + ["strict"] * 2, (
        "and what is in Run still"
    )


async def test_a_backend_that_gets_other_weights_takes_back_what_is_in_run_on_it(calm: Any) -> None:
    held = await _on_pools(calm, one=None, two=None, team=None)
    worker = Worker(calm.worker)
    leases = [lease for of_job in held.values() for lease in of_job]
    url = held["one"][0]["backend"]["url"]
    there = [x for x in leases if x["backend"]["url"] == url and x["namespace"] == "default"]
    assert 2 <= len(there) < 4, "the backends share the rollouts"
    done = there.pop()
    assert await worker.complete(worker.result(done)) == ["accepted"]

    def fence(tx: Transaction) -> int:
        return staleness.fence(tx, "default", "p", url)

    assert await calm.plane.database.write(fence) == len(there)
    beat = await worker.heartbeat(*[lease for lease in leases if lease is not done])
    assert {one["rollout"] for one in beat["lost"]} == {lease["rollout"] for lease in there}
    assert [one["rollout"] for one in await worker.lease(eval=4)] == [done["rollout"]]


@pytest.mark.parametrize("shape", ["vllm"], indirect=True)
async def test_in_flight_restart_fences_what_is_in_run(
    settings: Settings, servers: list[Scripted], checkpoint: Path
) -> None:
    async with serving(settings, **quick(settings)) as served:
        await made(served.admin, [server.url for server in servers])
        await served.submit(backendRef={"name": "p"}, agent={"type": "tools"})
        worker = Worker(served.worker)
        held = await worker.reach("run", 2)
        sandboxes = [one["sandbox"]["id"] for one in held]
        done = await ended(
            served.admin, (await post(served.admin, checkpoint, inFlight="restart")).json()["id"]
        )
        assert done["state"] == "Succeeded"
        beat = await worker.heartbeat(*held, sandboxes=sandboxes)
        assert len(beat["lost"]) == 2
        assert sorted(beat["orphans"]) == sorted(sandboxes)
        assert await worker.complete(*[worker.result(one) for one in held]) == ["stale", "stale"]
        again = await worker.lease(init=2)
        assert {one["rollout"] for one in again} == {one["rollout"] for one in held}
        await worker.complete(*[worker.result(one) for one in again])
        assert {one["backend"]["policy_version"] for one in await worker.lease(run=2)} == {"v1"}
        items = (await served.admin.get("/v1/rolloutjobs/job/rollouts")).json()["items"]
        attempts = [one for item in items for one in item["attempts"]]
        assert [(one["stage"], one["attempt"], one["reason"], one["counted"]) for one in attempts] == [
            ("run", 1, "WeightsUpdated", False)
        ] * 2


@pytest.mark.parametrize("shape", ["vllm"], indirect=True)
async def test_one_of_two_replicas_makes_an_update(
    request: pytest.FixtureRequest, tmp_path: Path, servers: list[Scripted], checkpoint: Path
) -> None:
    database = request.getfixturevalue("fresh_postgres")
    common: dict[str, Any] = {"db": database, "trajectories": str(tmp_path / "store"), "recheck_seconds": 0.1}
    one = Settings(state_dir=tmp_path / "a", sweep_seconds=3600.0, **common)
    two = one.model_copy(update={"state_dir": tmp_path / "b"})
    async with serving(one, **quick(one)) as first, serving(two, **quick(two)) as second:
        await made(first.admin, [server.url for server in servers])
        for server in servers:
            server.seen.clear()
        number = (await post(second.admin, checkpoint)).json()["id"]
        done = await ended(first.admin, number)
        assert (done["state"], done["verified"]) == ("Succeeded", True)
        assert [server.seen.count(server.paths["load"]) for server in servers] == [1, 1], "loaded once each"
