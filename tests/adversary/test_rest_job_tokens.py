"""What the holder of a job's token tries: another job's rollouts, sandboxes and claims, and a later life."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from rollyard_api.access import permissions
from rollyard_api.core.wakeups import queue_topic
from rollyard_api.jobs import jobs
from rollyard_api.storage import statements
from rollyard_crds.claims import SandboxShape
from rollyard_crds.security.job_token import JobIdentity, job_of, job_token
from rollyard_testing.adversary.restplane import Yard, control_plane, result
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually
from sqlalchemy.engine import Connection

pytestmark = pytest.mark.attack(boundary="worker", surface="job token")


SHAPE = SandboxShape(cpu=1, memory_bytes=1 << 30, disk_bytes=1 << 30, processes=64).model_dump()


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with control_plane(tmp_path) as made:
        await made.submit("mine", tasks=3)
        await made.submit("other", tasks=3)
        yield made


def token_without_uid(worker_token: str, namespace: str, name: str) -> str:
    """Return what would serve every later life of a job, with a genuine HMAC."""
    said = f"job {namespace}/{name}".encode()
    return f"ry-job.{namespace}.{name}.{hmac.new(worker_token.encode(), said, hashlib.sha256).hexdigest()}"


# The token itself.


@pytest.mark.attack(
    "it is changed to name another job or uid", stopped_by="an HMAC under the worker token over all of it"
)
def test_a_token_is_of_one_life_of_one_job() -> None:
    token = job_token("secret", "default", "a", "u-1")
    found = job_of(token, "secret")
    assert found is not None
    assert (found.namespace, found.name, found.uid) == ("default", "a", "u-1")
    assert job_of(token, "another secret") is None
    for forged in (token.replace(".a.", ".b."), token.replace("u-1", "u-2"), token.replace(".u-1", "")):
        assert job_of(forged, "secret") is None
    for text in ("", "ry-job", "ry-job.a.b", "ry-job.a.b.c.d", "ry-job.a.b.c.d.e", f"{token}.x", "secret"):
        assert job_of(text, "secret") is None


@pytest.mark.attack(
    "a name with a dot makes a token of other parts", stopped_by="tokens are made of DNS labels and uids only"
)
@pytest.mark.parametrize(
    "parts", [("", "a", "u"), ("n", "a.b", "u"), ("n", "a", ""), ("n", "a", "u.v"), ("n/", "a", "u")]
)
def test_a_token_is_made_of_names_only(parts: tuple[str, str, str]) -> None:
    with pytest.raises(ValueError, match="a job token needs the job's"):
        job_token("secret", *parts)


# A later life of the job's name.


TOKEN_OF_A_DELETED_JOB = pytest.mark.attack(
    "the token of a deleted job is used for a new job of its name", stopped_by="tokens carry the job's uid"
)


@TOKEN_OF_A_DELETED_JOB
async def test_the_token_of_a_deleted_job_is_worth_nothing_to_its_successor(yard: Yard) -> None:
    http = yard.client(yard.job_token("mine"))
    (lease, *_) = await yard.lease(http, "mine", init=1)
    claim = f"/v1/claims/{(await _claim(http, lease)).json()['id']}"
    assert (await yard.admin.delete("/v1/rolloutjobs/mine")).status_code in (200, 202, 204)
    uid = await yard.submit("mine")
    ask = {"worker": "w", "node": "n", "capacity": {"init": 4}, "job": "mine"}
    refused = await http.post("/v1/leases", json=ask)
    assert refused.status_code == 403, refused.text
    assert refused.json()["reason"] == "JobEnded"
    assert "deleted, or replaced" in refused.json()["detail"]
    assert (await http.get("/v1/leases/job", params={"name": "mine"})).status_code == 403
    late = await http.post("/v1/leases/complete", json={"worker": "w", "results": [result(lease)]})
    assert late.status_code == 200, "late reports are answered, so that a worker can end"
    assert late.json()["outcomes"][0]["outcome"] in ("cancelled", "unknown")
    fresh = yard.client(yard.job_token("mine", uid))
    assert len(await yard.lease(fresh, "mine", init=4)) == 1
    assert [(await one.get(claim)).status_code for one in (fresh, http, yard.worker)] == [403, 403, 200]


DELETION_MEANWHILE = pytest.mark.attack(
    "it is used at the moment in which its job is deleted",
    stopped_by="what is remembered of a job holds until any commit changes a job, which triggers notice",
)


@DELETION_MEANWHILE
async def test_a_remembered_token_is_refused_as_soon_as_its_job_is_gone(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database notices every change of a job, even one that no function of ours makes."""
    looks: list[str] = []
    look_up = permissions.look_up

    def counted(conn: Connection, identity: JobIdentity) -> permissions.BoundJob:
        looks.append(identity.name)
        return look_up(conn, identity)

    monkeypatch.setattr(permissions, "look_up", counted)
    http = yard.client(yard.job_token("mine"))

    async def status() -> int:
        answer = await http.get("/v1/leases/job", params={"name": "mine"})
        return answer.status_code

    async def change(words: str) -> None:
        await yard.plane.database.write(lambda tx: tx.conn.exec_driver_sql(words) and None)

    assert [await status() for _ in range(5)] == [200] * 5
    assert looks == ["mine"], "nothing has changed, so one look is enough"
    await change("UPDATE jobs SET succeeded = succeeded")
    assert await status() == 200
    assert looks == ["mine"], "counts of rollouts have no part in it"
    for words, expected in (
        ("UPDATE jobs SET deleted_at = 1.0 WHERE name = 'mine'", 403),
        ("UPDATE jobs SET deleted_at = NULL WHERE name = 'mine'", 200),
        ("UPDATE jobs SET uid = 'of-another-life' WHERE name = 'mine'", 403),
    ):
        await change(words)
        assert await status() == expected, words
    assert looks == ["mine"] * 4


@pytest.mark.attack(
    "requests with a token make the control plane read large jobs again and again",
    stopped_by="checking a token reads no column that may be large",
)
async def test_a_look_reads_nothing_of_a_job_that_may_be_large(yard: Yard) -> None:
    """Where other replicas write, each request of a worker is a look."""
    texts: list[str] = []

    def note(_conn: Any, _cursor: Any, text: str, *_more: Any) -> None:
        texts.append(text)

    sa.event.listen(yard.plane.database.reader, "before_cursor_execute", note)
    http = yard.client(yard.job_token("mine"))
    assert (await http.get("/v1/leases/images", params={"name": "mine"})).status_code == 200
    look = texts[0]
    assert "FROM jobs" in look
    assert not [column for column in ("spec", "metadata", "status", "limits") if f"jobs.{column}" in look]


@DELETION_MEANWHILE
async def test_a_look_that_a_deletion_overtakes_is_not_remembered(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is deleted between the look at the database and the answer to the request."""
    database, http = yard.plane.database, yard.client(yard.job_token("mine"))
    read, overtaken = database.read, asyncio.Event()

    async def slow(query: Any) -> Any:
        found = await read(query)
        if not overtaken.is_set():
            overtaken.set()
            await database.write(lambda tx: jobs.delete(tx, "default", "mine"))
        return found

    monkeypatch.setattr(database, "read", slow)
    await http.get("/v1/leases/job", params={"name": "mine"})
    assert overtaken.is_set()
    again = await http.get("/v1/leases/job", params={"name": "mine"})
    assert again.status_code == 403
    assert again.json()["reason"] == "JobEnded"


@pytest.mark.attack(
    "a long poll begins before the job is replaced, and is answered with its successor's rollouts",
    stopped_by="leases are found by the job's row, not by its name",
)
async def test_a_long_poll_of_the_old_token_gets_nothing_of_the_successor(yard: Yard) -> None:
    """The poll began before the job was replaced, so what it finds later has another uid."""
    http = yard.client(yard.job_token("mine"))
    await yard.lease(http, "mine", init=3)
    ask = {"worker": "w", "node": "n", "capacity": {"init": 4}, "job": "mine", "wait": 30}
    poll = asyncio.create_task(http.post("/v1/leases", json=ask))
    await eventually(lambda: yard.plane.bus._waiting.get(queue_topic("init")), patience(30))
    await yard.plane.database.write(lambda tx: jobs.delete(tx, "default", "mine"))
    await yard.submit("mine")
    answer = await asyncio.wait_for(poll, patience(30))
    assert answer.json() == {"leases": [], "draining": True, "places": None}


@pytest.mark.attack(
    "it is used after its job has ended", stopped_by="it only reports leases, and learns that it may stop"
)
async def test_the_token_of_a_finished_job_reports_and_learns_that_it_may_stop(yard: Yard) -> None:
    http = yard.client(yard.job_token("mine"))
    leases = await yard.lease(http, "mine", init=3)
    failures = [
        {k: lease[k] for k in ("rollout", "token", "stage")} | {"reason": "Broken", "retryable": False}
        for lease in leases
    ]
    ended = await http.post("/v1/leases/fail", json={"worker": "w", "failures": failures})
    assert {one["outcome"] for one in ended.json()["outcomes"]} == {"accepted"}
    again = await http.post("/v1/leases/fail", json={"worker": "w", "failures": failures})
    assert {one["outcome"] for one in again.json()["outcomes"]} == {"repeated"}
    ask = {"worker": "w", "node": "n", "capacity": {"init": 4}, "job": "mine"}
    answer = await http.post("/v1/leases", json=ask)
    assert answer.json() == {"leases": [], "draining": True, "places": None}
    claim = {"rollout": leases[0]["rollout"], "token": leases[0]["token"], "shape": SHAPE}
    for refused in (
        await http.post("/v1/claims", json=claim),
        await http.get("/v1/claims/c1"),
        await http.post("/v1/leases/route", json={"rollout": "r", "token": 1, "failed_url": "http://x"}),
    ):
        assert refused.status_code == 403
        assert refused.json()["reason"] == "JobEnded"
        assert "has ended" in refused.json()["detail"]


@TOKEN_OF_A_DELETED_JOB
async def test_a_job_of_an_object_is_known_by_the_object_s_uid_too(yard: Yard) -> None:
    """The operator knows the uid of the object, and makes tokens before it has read the job."""
    driver = yard.client(yard.plane.tokens.current("driver"))
    manifest = (await yard.admin.get("/v1/rolloutjobs/other")).json()
    manifest["metadata"] = {"name": "kube", "annotations": {"rollyard.dev/object-uid": "0b9c-object"}}
    manifest.pop("status")
    made = await driver.put("/v1/rolloutjobs/kube", json={"manifest": manifest})
    assert made.status_code == 201, made.text
    for uid in ("0b9c-object", made.json()["metadata"]["uid"]):
        http = yard.client(yard.job_token("kube", uid))
        assert len(await yard.lease(http, "kube", init=1)) == 1
    assert (await yard.client(yard.job_token("kube", "another")).get("/v1/leases/job")).status_code == 403


@pytest.mark.attack(
    "it is used for a job of the same name in another namespace",
    stopped_by="tokens carry the namespace and the uid",
)
async def test_a_job_of_the_same_name_in_another_namespace_is_another_job(yard: Yard) -> None:
    made = await yard.admin.get("/v1/rolloutjobs/mine")
    twin = {key: made.json()[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": "mine"}}
    answer = await yard.admin.post("/v1/rolloutjobs", params={"namespace": "team"}, json=twin)
    assert answer.status_code == 201, answer.text
    mine = yard.client(yard.job_token("mine"))
    (lease,) = await yard.lease(mine, "mine", init=1)
    assert lease["namespace"] == "default"
    ask = {"worker": "w", "node": "n", "capacity": {"init": 1}, "job": "mine", "namespace": "team"}
    assert (await mine.post("/v1/leases", json=ask)).status_code == 403
    (theirs,) = (await yard.worker.post("/v1/leases", json=ask)).json()["leases"]
    beat = {"worker": "w", "node": "n", "leases": [{"rollout": theirs["rollout"], "token": 1}]}
    assert (await mine.post("/v1/leases/heartbeat", json=beat)).status_code == 403
    await yard.admin.delete("/v1/rolloutjobs/mine")
    ended = await mine.get("/v1/leases/job", params={"name": "mine"})
    assert (ended.status_code, ended.json()["reason"]) == (403, "JobEnded")
    uid = answer.json()["metadata"]["uid"]
    forged = yard.client(job_token(yard.plane.tokens.current("worker"), "default", "mine", uid))
    assert (await forged.get("/v1/leases/job", params={"name": "mine"})).status_code == 403


@pytest.mark.attack(
    "one without a uid is made, so that it outlives the job",
    stopped_by="it is no job token, whatever its HMAC",
)
async def test_a_token_without_a_uid_is_refused(yard: Yard) -> None:
    http = yard.client(token_without_uid(yard.plane.tokens.current("worker"), "default", "mine"))
    answer = await http.get("/v1/leases/job", params={"name": "mine"})
    assert (answer.status_code, answer.json()["reason"]) == (401, "Unauthorized")


# Another job's rollouts, sandboxes and claims.


async def _claim(http: httpx.AsyncClient, lease: dict[str, Any]) -> httpx.Response:
    asked = {"rollout": lease["rollout"], "token": lease["token"], "shape": SHAPE}
    return await http.post("/v1/claims", json=asked)


@pytest.mark.attack(
    "a worker reads, releases or fulfils the claims of another job, or lists them",
    surface="`/v1/claims`",
    stopped_by="claims are compared with the token's job",
)
async def test_a_job_token_files_reads_and_releases_claims_of_its_job_only(yard: Yard) -> None:
    mine, other = yard.client(yard.job_token("mine")), yard.client(yard.job_token("other"))
    (lease,) = await yard.lease(mine, "mine", init=1)
    filed = await _claim(mine, lease)
    assert filed.status_code == 200, filed.text
    path = f"/v1/claims/{filed.json()['id']}"
    assert (await mine.get(path)).status_code == 200
    stolen = [await _claim(other, lease), await other.get(path), await other.delete(path)]
    stolen += [await mine.get("/v1/claims"), await mine.put(f"{path}/status", json={"state": "Removed"})]
    assert [answer.status_code for answer in stolen] == [403] * 5
    assert (await mine.get(path)).json()["state"] == "Pending", "nobody else released it"
    assert (await mine.delete(path)).status_code == 204
    assert (await mine.get(path)).json()["state"] == "Released"


@pytest.mark.attack(
    "a worker hides another job's rollout among many of its own",
    surface="every call of a worker",
    stopped_by="every name is compared, in whatever number of queries",
)
async def test_a_rollout_of_another_job_is_found_among_many(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are looked up in several queries, and each of them counts."""
    monkeypatch.setattr(statements, "IDS_AT_ONCE", 2)
    mine, other = yard.client(yard.job_token("mine")), yard.client(yard.job_token("other"))
    own = await yard.lease(mine, "mine", init=3)
    (foreign,) = await yard.lease(other, "other", init=1)
    for unknown, status in (([], 200), (["0", "00"], 200), (["0", "00", foreign["rollout"]], 403)):
        leases = [{"rollout": one["rollout"], "token": one["token"]} for one in own]
        leases += [{"rollout": one, "token": 1} for one in unknown]
        beat = {"worker": "w", "node": "n", "leases": leases}
        assert (await mine.post("/v1/leases/heartbeat", json=beat)).status_code == status


@pytest.mark.attack(
    "a worker names rollouts, sandboxes or claims of another job, or asks which images its tasks need",
    surface="every call of a worker",
    stopped_by="each is compared with the token's job before anything changes",
)
async def test_every_worker_call_is_refused_for_another_job(yard: Yard) -> None:
    """There is one attack for each call that a job token may make.

    A call that is added needs one here, too.
    """
    mine, other = yard.client(yard.job_token("mine")), yard.client(yard.job_token("other"))
    first, second = await yard.lease(other, "other", init=2)
    await other.post("/v1/leases/complete", json={"worker": "o", "results": [result(first)]})
    sandbox = result(first)["sandbox"]["id"]
    claim = (await _claim(other, second)).json()["id"]
    ref = {"rollout": second["rollout"], "token": second["token"]}
    beat = {"worker": "w", "node": "n-other", "leases": []}
    ask = {"worker": "w", "node": "n-other", "capacity": {"init": 4, "run": 4, "eval": 4}}
    failure = {**ref, "stage": "init", "reason": "x", "retryable": False}
    (own,) = await yard.lease(mine, "mine", init=1)
    taken = result(own)
    taken["sandbox"]["id"] = sandbox
    attacks: dict[tuple[str, str], list[dict[str, Any]]] = {
        ("POST", "/v1/leases"): [{"json": ask}, {"json": ask | {"job": "other"}}],
        ("GET", "/v1/leases/job"): [{"params": {"name": "other"}}],
        ("GET", "/v1/leases/images"): [{"params": {"name": "other"}}],
        ("GET", "/v1/leases/plugin"): [{"params": {"name": "other", "sha256": "0" * 64}}],
        ("POST", "/v1/leases/route"): [{"json": ref | {"failed_url": "http://x"}}],
        ("POST", "/v1/leases/reward"): [{"json": ref | {"episode": {}}}],
        ("POST", "/v1/leases/heartbeat"): [
            {"json": beat | {"leases": [ref]}},
            {"json": beat | {"sandboxes": [sandbox], "ending": [sandbox]}},
        ],
        ("POST", "/v1/leases/complete"): [
            {"json": {"worker": "w", "results": [result(second)]}},
            {"json": {"worker": "w", "results": [taken]}},
        ],
        ("POST", "/v1/leases/fail"): [{"json": {"worker": "w", "failures": [failure]}}],
        ("POST", "/v1/claims"): [{"json": ref | {"shape": SHAPE}}],
        ("GET", "/v1/claims/{claim}"): [{}],
        ("DELETE", "/v1/claims/{claim}"): [{}],
    }
    open_to_job_tokens = {key for key, rule in permissions.RULES.items() if rule.until is not None}
    assert set(attacks) == open_to_job_tokens
    before = (await yard.admin.get("/v1/rolloutjobs/other")).json()["status"]["counts"]
    for (method, path), requests in attacks.items():
        for given in requests:
            answer = await mine.request(method, path.replace("{claim}", claim), **given)
            assert answer.status_code == 403, (method, path, given, answer.text)
    assert (await yard.admin.get("/v1/rolloutjobs/other")).json()["status"]["counts"] == before
    assert (await other.get(f"/v1/claims/{claim}")).json()["state"] == "Pending"


# Every route has a rule.


def _routes(yard: Yard) -> set[tuple[str, str]]:
    """Return method and template of every route that the application answers."""
    found: set[tuple[str, str]] = set()

    def walk(routes: list[Any], prefix: str) -> None:
        for route in routes:
            inner = getattr(route, "original_router", None) or getattr(route, "app", None)
            if hasattr(route, "methods"):
                found.update((method, prefix + route.path) for method in route.methods or ())
            elif inner is not None and hasattr(inner, "routes"):
                walk(inner.routes, prefix + getattr(route, "path", ""))
            else:
                raise AssertionError(f"a route of an unknown kind: {route!r}")

    walk(yard.app.routes, "")
    for path, methods in yard.app.openapi()["paths"].items():
        found.update((method.upper(), path) for method in methods)
    return found


@pytest.mark.attack(
    "a route that is added later is open",
    surface="REST",
    stopped_by="a route without a rule is the admin's alone, and a test fails",
)
async def test_every_route_says_who_may_call_it(yard: Yard) -> None:
    served = {("GET" if method == "HEAD" else method, path) for method, path in _routes(yard)}
    assert served == set(permissions.RULES), "each route of the application has a rule, and each rule a route"


@pytest.mark.attack(
    "a role may make more calls than docs/drivers.md says",
    surface="REST",
    stopped_by="the table of rules is compared with what is promised",
)
def test_each_role_may_make_the_calls_that_are_promised_and_no_others() -> None:
    """The table of roles in docs/drivers.md, and what a job's token may still do once the job has ended."""
    rules = permissions.RULES

    def having(role: str) -> set[tuple[str, str]]:
        return {call for call, rule in rules.items() if role in rule.roles}

    single_claims = {("POST", "/v1/claims"), ("GET", "/v1/claims/{claim}"), ("DELETE", "/v1/claims/{claim}")}
    of_leases = {call for call in rules if call[1].startswith("/v1/leases")}
    assert having("worker") == of_leases | single_claims
    assert {call for call, rule in rules.items() if rule.until is not None} == of_leases | single_claims
    reports = {("POST", f"/v1/leases/{what}") for what in ("heartbeat", "complete", "fail")}
    learning = {("POST", "/v1/leases"), ("GET", "/v1/leases/job"), ("DELETE", "/v1/claims/{claim}")}
    assert {call for call, rule in rules.items() if permissions.still(rule, "gone")} == reports
    assert {call for call, rule in rules.items() if permissions.still(rule, "finished")} == reports | learning

    own = ("/v1/leases", "/v1/claims", "/v1/backendpools")
    assert {call for call in rules if call[1].startswith(own)} <= having("driver")
    assert {
        (method, path) for method, path in having("driver") if method != "GET" and not path.startswith(own)
    } == {
        ("PUT", "/v1/rolloutjobs/{name}"),
        ("DELETE", "/v1/rolloutjobs/{name}"),
        ("POST", "/v1/rolloutjobs/{name}/cancel"),
        ("PUT", "/v1/rolloutjobs/{name}/status"),
        ("POST", "/v1/workers/died"),
        ("POST", "/v1/workers/offers"),
    }
    assert not any("tasks" in path or "cursors" in path for _, path in having("driver"))
    sending = {
        call: rule.max_body for call, rule in rules.items() if rule.until is not None and call[0] == "POST"
    }
    assert {call for call, most in sending.items() if most is None} == {("POST", "/v1/leases/complete")}
    assert having("metrics") == {("GET", "/metrics")}
    assert having("ready") == {("POST", "/v1/workers/assignment")}
    opened = {call for call, rule in rules.items() if rule.open}
    assert opened == {("GET", "/healthz"), ("GET", "/readyz"), ("POST", "/v1/session")}


@pytest.mark.attack(
    "no token, a guessed one, or one of another role is tried on every route",
    surface="REST",
    stopped_by="one table of rules decides before any route",
)
async def test_no_route_answers_a_caller_whom_its_rule_does_not_name(yard: Yard) -> None:
    callers = {
        "nobody": None,
        "a guess": "ry-admin-guess",
        "metrics": yard.plane.tokens.by_role["metrics"][0],
        "viewer": yard.plane.tokens.by_role["viewer"][0],
        "job": yard.job_token("mine"),
        "worker": yard.plane.tokens.current("worker"),
        "driver": yard.plane.tokens.current("driver"),
    }
    wrong = []
    for who, token in callers.items():
        http = yard.client(token)
        for (method, template), rule in permissions.RULES.items():
            if rule.open or who in rule.roles or (who == "job" and rule.until is not None):
                continue
            path = template.replace("{name}", "mine").replace("{claim}", "c1").replace("{rollout}", "r")
            answer = await http.request(method, path.replace("{number}", "1"), json={})
            if answer.status_code != (401 if who in ("nobody", "a guess") else 403):
                wrong.append((who, method, path, answer.status_code))
    assert wrong == []


@pytest.mark.attack(
    "a network peer learns namespaces, jobs, pools and load, or the list of calls",
    boundary="control plane",
    surface="`/metrics`, `/docs`",
    stopped_by="they need a token unless the installer opens them",
)
async def test_metrics_and_documentation_are_closed_unless_they_are_opened(
    yard: Yard, tmp_path: Path
) -> None:
    nobody, admin = yard.client(None), yard.admin
    metrics = yard.client(yard.plane.tokens.by_role["metrics"][0])
    for path in ("/metrics", "/docs", "/openapi.json"):
        assert (await nobody.get(path)).status_code == 401
        assert (await yard.client(yard.job_token("mine")).get(path)).status_code == 403
        assert (await admin.get(path)).status_code == 200
    assert (await metrics.get("/metrics")).status_code == 200
    assert (await metrics.get("/docs")).status_code == 403
    assert (await nobody.get("/redoc")).status_code == 401
    for path in ("/healthz", "/readyz"):
        assert (await nobody.get(path)).status_code == 200
    async with control_plane(tmp_path / "open", open_metrics=True, open_docs=True) as opened:
        for path in ("/metrics", "/docs", "/openapi.json"):
            assert (await opened.client(None).get(path)).status_code == 200
