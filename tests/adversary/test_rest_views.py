"""Attacks on the calls that people look with: by viewers, by workers, and by what a policy wrote."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rollyard_api.access import permissions
from rollyard_api.views.job.folding import MAX_KEYS, Sketch
from rollyard_api.views.rollout import live, texts
from rollyard_crds.lease import MAX_LIVE_TEXT, MAX_LIVE_TURNS
from rollyard_crds.reading.vocabulary import TokenizerInvalid, read
from rollyard_testing.adversary.restplane import Yard, control_plane, result
from rollyard_testing.crds.segments import reported
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="viewers")


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
HOSTILE = "<script>alert(1)</script>\u202e\u0007\x1b[2J\x1b]0;owned\x07%s%n' OR 1=1 --"


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    """Yield a control plane with the jobs `mine` and `other` of three rollouts each."""
    async with control_plane(tmp_path, fleet_seconds=0.0, folding_seconds=3600.0) as made:
        await made.submit("mine", tasks=3)
        await made.submit("other", tasks=3)
        yield made


def viewer(yard: Yard) -> Any:
    return yard.client(yard.plane.tokens.by_role["viewer"][0])


def _dump(conn: Any) -> list[Any]:
    tables = (
        "jobs",
        "groups",
        "rollouts",
        "pools",
        "backends",
        "claims",
        "cursors",
        "blobs",
        "weight_updates",
    )
    return [tuple(row) for table in tables for row in conn.exec_driver_sql(f"SELECT * FROM {table}").all()]


@pytest.mark.attack(
    "its holder changes something, or reads tasks (with answers and hidden tests), uploads, claims or "
    "cursors, by any route and method",
    surface="role `viewer`",
    stopped_by="one rule for each route; a route without one is the admin's. Records say what their "
    "evaluation compared and printed (`reward_output`), and viewers read records",
)
async def test_a_viewer_reads_and_changes_nothing(yard: Yard) -> None:
    """Every route is tried with every method, and the tables are the same afterwards."""
    http = viewer(yard)
    (lease,) = await yard.lease(yard.worker, "mine", init=1)
    before = await yard.plane.database.read(_dump)
    names = {"name": "mine", "rollout": lease["rollout"], "claim": "c1", "cursor": "c", "number": "1"}
    names["sha256"] = "0" * 64
    allowed, rules = 0, permissions.Access()
    for template in sorted({path for _, path in permissions.RULES} | {"/", "/redoc", "/v1", "/v1/nothing"}):
        path = template.format(**names)
        for method in METHODS:
            if (method, path) in (("GET", "/v1/events"), ("HEAD", "/v1/events")) or path.endswith("/events"):
                continue  # Streams that do not end; the viewer may follow them.
            answer = await http.request(method, path, json={"x": 1} if method != "GET" else None)
            if path == "/":
                assert answer.status_code == (
                    200 if method in ("GET", "HEAD") else 405
                )  # It is a file of the page.
                continue
            rule = rules.rule(method, path)
            may = rule.open or "viewer" in rule.roles
            if may and method == "GET":
                allowed += 1
                assert answer.status_code not in (401, 403), (method, path)
            if not may:
                assert answer.status_code == 403, (method, path, answer.status_code)
    assert allowed >= 20
    assert await yard.plane.database.read(_dump) == before
    reading = {key for key, rule in permissions.RULES.items() if "viewer" in rule.roles}
    # A viewer may make and end sessions of viewers in the page.
    assert {method for method, path in reading if not path.startswith("/v1/session")} == {"GET"}
    for word in ("blobs", "claims", "leases", "cursors", "tasks"):
        assert not any(word in path for _, path in reading), word


@pytest.mark.attack(
    "a job, or a list of jobs, shows its holder the inline tasks with their answers and hidden tests",
    surface="role `viewer`",
    stopped_by="both leave the tasks out for viewers and sessions of the page",
)
async def test_a_viewer_sees_no_inline_task(yard: Yard) -> None:
    tasks = {"inline": [{"id": "t", "prompt": "p", "answer": "the-hidden-answer"}]}
    body = {"tasks": tasks, "handler": "math", "agent": {"type": "oracle"}}
    made = await yard.admin.post("/v1/rolloutjobs", json=job_manifest("graded", body))
    assert made.status_code == 201, made.text
    for path in ("/v1/rolloutjobs/graded", "/v1/rolloutjobs", "/v1/rolloutjobs?omit="):
        assert "the-hidden-answer" in (await yard.admin.get(path)).text
        seen = await viewer(yard).get(path)
        assert seen.status_code == 200
        assert "graded" in seen.text
        assert "the-hidden-answer" not in seen.text, path


@pytest.mark.attack(
    "an id of another job or namespace, or one that is a path, shows what is not the job's",
    surface="rollouts by id",
    stopped_by="rows are found by job and id",
)
async def test_a_viewer_reaches_a_rollout_by_its_own_job_only(yard: Yard) -> None:
    (lease,) = await yard.lease(yard.worker, "other", init=1)
    failure = {k: lease[k] for k in ("rollout", "token", "stage")} | {"reason": "Broken", "retryable": False}
    await yard.worker.post("/v1/leases/fail", json={"worker": "w", "failures": [failure]})
    (running,) = await yard.lease(yard.worker, "other", init=1)
    http = viewer(yard)
    for rollout in (lease["rollout"], running["rollout"], "..", "%2e%2e", "x' OR '1'='1", "x" * 5000):
        for piece in ("brief", "messages", "messages/0", "tokens", "difference?other=x", "live"):
            for where in ("mine", "missing"):
                path = f"/v1/rolloutjobs/{where}/rollouts/{rollout}/{piece}"
                answer = await http.get(path)
                assert answer.status_code in (403, 404), (path[:80], answer.status_code)
            joiner = "&" if "?" in piece else "?"
            path = f"/v1/rolloutjobs/other/rollouts/{rollout}/{piece}{joiner}namespace=theirs"
            assert (await http.get(path)).status_code in (403, 404), path[:80]


@pytest.mark.attack(
    "a pattern takes for ever, or means something to the database",
    surface="search and filters",
    stopped_by="texts are compared as texts; the time of a search is bounded",
)
async def test_searches_and_filters_are_no_patterns(yard: Yard) -> None:
    """What would blow up a regular expression, or mean something to SQL, is a text like others."""
    http = viewer(yard)
    for text in ("(a+)+$" * 20, "%" * 128, "_" * 128, "\x00", "' OR 1=1 --", "a" * 256, "\u202e", "[" * 100):
        began = time.monotonic()
        for path, name in (
            ("/v1/jobs", "search"),
            ("/v1/rolloutjobs/mine/grid", "search"),
            ("/v1/rolloutjobs/mine/rollouts?slim=true", "search"),
            ("/v1/rolloutjobs/mine/rollouts?slim=true&sort=-reward", "reason"),
            ("/v1/rolloutjobs/mine/rollouts?slim=true&sort=-reward", "task"),
        ):
            joiner = "&" if "?" in path else "?"
            answer = await http.get(f"{path}{joiner}x=1", params={name: text} if "?" not in path else None)
            assert answer.status_code in (200, 400, 422), (path, text[:20], answer.text[:200])
            answer = await http.get(path.partition("?")[0], params={"slim": True, name: text})
            assert answer.status_code in (200, 400, 422), (path, text[:20], answer.text[:200])
        assert time.monotonic() - began < patience(30)
    assert (await http.get("/v1/rolloutjobs/mine/grid", params={"search": "%"})).json()["items"] == []


@pytest.mark.attack(
    "its text holds control characters, or fills the overview",
    surface="last error of a worker",
    stopped_by="it is escaped and cut when it is written",
)
async def test_a_worker_s_texts_reach_the_overview_escaped_and_short(yard: Yard) -> None:
    (lease,) = await yard.lease(yard.worker, "mine", init=1)
    failure = {k: lease[k] for k in ("rollout", "token", "stage")}
    failure |= {"reason": "Bad\x1bReason" + "R" * 100, "message": HOSTILE * 40}
    sent = await yard.worker.post("/v1/leases/fail", json={"worker": "w-mine", "failures": [failure]})
    assert sent.status_code == 200, sent.text
    await yard.plane.views.seen_workers.write()
    found = (await viewer(yard).get("/v1/overview")).json()
    (seen,) = [one for one in found["workers"] if one["name"] == "w-mine"]
    error = seen["last_error"]
    for text in (error["message"], error["reason"]):
        assert not any(ord(letter) < 32 or letter in "\u202e\x7f" for letter in text)
    assert len(error["message"]) <= 512
    assert len(error["reason"]) <= 128


@pytest.mark.attack(
    "a token that may lease names a new worker with each request",
    surface="names of workers",
    stopped_by="they are bounded in memory and in answers, and forgotten after an hour",
)
async def test_a_flood_of_workers_is_bounded(yard: Yard) -> None:
    """A token that may lease names a new worker with each request."""
    plane = yard.plane
    for number in range(40_000):
        plane.views.seen_workers.heard(None, f"w{number}", "n" * 253, time.time(), {"run": 4096})
    await plane.views.seen_workers.write()
    answer = await viewer(yard).get("/v1/overview")
    assert len(answer.json()["workers"]) == 500
    assert len(answer.content) < 2 << 20


@pytest.mark.attack(
    "the worker of one job sends turns of another job's rollout, or under an older lease",
    surface="running rollouts",
    stopped_by="turns count for leases that the heartbeat renews, and a token reaches its own job",
)
async def test_a_job_s_worker_sends_turns_of_its_own_rollouts_only(yard: Yard) -> None:
    (victim,) = await yard.lease(yard.worker, "other", init=1)
    http = yard.client(yard.job_token("mine"))
    (own,) = await yard.lease(http, "mine", init=1)
    watcher = viewer(yard)
    path = f"/v1/rolloutjobs/other/rollouts/{victim['rollout']}/live"
    assert (await watcher.get(path)).status_code == 200
    turn = {"no": 0, "role": "assistant", "text": "forged"}
    beat = {"worker": "w", "node": "n", "leases": [{"rollout": own["rollout"], "token": own["token"]}]}
    forged = {"rollout": victim["rollout"], "token": victim["token"], "turns": [turn]}
    sent = await http.post("/v1/leases/heartbeat", json=beat | {"live": [forged]})
    assert sent.status_code == 200, sent.text
    named = beat | {"leases": [{"rollout": victim["rollout"], "token": victim["token"]}], "live": [forged]}
    assert (await http.post("/v1/leases/heartbeat", json=named)).status_code == 403
    assert (await watcher.get(path)).json()["turns"] == []


TURNS_WITHOUT_END = pytest.mark.attack(
    "a worker sends turns without end, or a viewer watches everything",
    surface="running rollouts",
    stopped_by="texts, turns, bytes and watched rollouts are bounded",
)


@TURNS_WITHOUT_END
async def test_a_worker_cannot_fill_memory_with_turns(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WATCH_SECONDS", 3600.0)
    (lease,) = await yard.lease(yard.worker, "mine", init=1)
    watcher, path = viewer(yard), f"/v1/rolloutjobs/mine/rollouts/{lease['rollout']}/live"
    await watcher.get(path)
    ref = {"rollout": lease["rollout"], "token": lease["token"]}
    beat = {"worker": "w", "node": "n", "leases": [ref]}

    async def send(turns: list[dict[str, Any]]) -> int:
        sent = await yard.worker.post("/v1/leases/heartbeat", json=beat | {"live": [{**ref, "turns": turns}]})
        return int(sent.status_code)

    turn = {"no": 0, "role": "assistant", "text": "x"}
    assert await send([turn | {"text": "x" * (MAX_LIVE_TEXT + 1)}]) == 422
    assert await send([turn | {"no": number} for number in range(MAX_LIVE_TURNS + 1)]) == 422
    assert await send([turn | {"no": -1}]) == 422
    assert await send([turn | {"text": "x" * (17 << 20)}]) == 413
    for first in range(0, 20 * MAX_LIVE_TURNS, MAX_LIVE_TURNS):
        many = [
            turn | {"no": first + place, "text": "\u0000" * MAX_LIVE_TEXT} for place in range(MAX_LIVE_TURNS)
        ]
        assert await send(many) == 200
    answer = await watcher.get(path)
    assert len(answer.content) < 2 * live.MAX_BYTES
    assert answer.json()["dropped"] > 1000
    assert answer.json()["turns"][-1]["no"] == 20 * MAX_LIVE_TURNS - 1


@TURNS_WITHOUT_END
async def test_a_viewer_watches_a_bounded_number_of_rollouts(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "WATCH_SECONDS", 3600.0)
    await yard.submit("large", tasks=200)
    leases = []
    while more := await yard.lease(yard.worker, "large", init=64):
        leases += more
    watcher = viewer(yard)
    told = [
        (await watcher.get(f"/v1/rolloutjobs/large/rollouts/{one['rollout']}/live")).status_code
        for one in leases
    ]
    assert told.count(200) == live.MAX_WATCHED_OF_JOB
    assert set(told) == {200, 429}


@pytest.mark.attack(
    "a tokenizer.json is huge, deep or no tokenizer, or its tokens are no text",
    surface="texts of tokens",
    stopped_by="it is read up to 64 MiB in a thread, as data; pieces are cut, and bytes that are no text "
    "are escaped",
)
async def test_hostile_tokenizers_are_refused_or_shown_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    hostile: list[Any] = [
        b"[" * 100_000,
        b"{}",
        b"\xff\xfe",
        json.dumps({"model": {"vocab": 7}}).encode(),
        json.dumps({"model": {"vocab": [["a"], []]}}).encode(),
        json.dumps({"model": {"vocab": {}}, "added_tokens": [7]}).encode(),
        json.dumps({"model": {"vocab": {str(n): n for n in range(texts.MAX_PIECES + 1)}}}).encode(),
    ]
    for data in hostile:
        path.write_bytes(data)
        with pytest.raises(TokenizerInvalid):
            read(path, texts.pieces, "it")
    with path.open("wb") as file:
        file.truncate(1 << 40)  # The file is sparse, and most of it is never read.
    with pytest.raises(TokenizerInvalid, match="more than"):
        read(path, texts.pieces, "it")
    vocabulary = {"<script>": 1, "\u202e": 2, "x" * 100_000: 3, "neg": -5, "half": 1.5}
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "decoder": {"type": "ByteFallback"}}))
    found = texts.texts_of(read(path, texts.pieces, "it"), [1, 2, 3, 99, -1])
    assert found == ["<script>", "\u202e", "x" * texts.MAX_PIECE_BYTES, "<?>", "<?>"]


ODD_NUMBERS = pytest.mark.attack(
    "numbers that no tokenizer has, or of any size, break the views of others",
    surface="token ids and rewards",
    stopped_by="they are clamped; a histogram has bounded room",
)


@ODD_NUMBERS
def test_rewards_of_any_size_take_bounded_room() -> None:
    sketch = Sketch()
    for number in range(20_000):
        sketch.add((-1) ** number * 1.01 ** (number % 1300))
        if number % 1000 == 0:
            sketch = msgspec.json.decode(msgspec.json.encode(sketch), type=Sketch)
    assert len(sketch.counts) <= MAX_KEYS
    assert sum(sketch.histogram()["bins"]) == 20_000


@ODD_NUMBERS
async def test_ids_that_no_tokenizer_has_do_no_harm(yard: Yard) -> None:
    """A worker may report any whole number as a token."""
    (lease,) = await yard.lease(yard.worker, "mine", init=1)
    prepared = result(lease, sandbox=None)
    await yard.worker.post("/v1/leases/complete", json={"worker": "w-mine", "results": [prepared]})
    (lease,) = await yard.lease(yard.worker, "mine", run=1)
    n = 4
    segment = {
        "prompt_ids": [0, 2**32 - 1],
        "response_ids": [2**32 - 1, 2**31, 2**16, 5],
        "loss_mask": [1] * n,
        "logprobs": [-1000, -1e-308, 0, -0.5],
        "policy_versions": ["x" * 10_000] * n,
    }
    trajectory = {
        "id": lease["rollout"],
        "job": "mine",
        "task_id": lease["task"]["id"],
        "group_id": lease["group_id"],
        "sample_index": 0,
        "segments": [segment],
    }
    done = reported({k: lease[k] for k in ("rollout", "token", "stage")} | {"trajectory": trajectory})
    sent = await yard.worker.post("/v1/leases/complete", json={"worker": "w-mine", "results": [done]})
    assert sent.status_code == 200, sent.text
    (lease,) = await yard.lease(yard.worker, "mine", eval=1)
    await yard.worker.post("/v1/leases/complete", json={"worker": "w-mine", "results": [result(lease)]})
    answer = await viewer(yard).get(f"/v1/rolloutjobs/mine/rollouts/{lease['rollout']}/tokens")
    assert answer.status_code == 200, answer.text
    assert answer.json()["ids"] == [0, 2**32 - 1, 2**32 - 1, 2**31, 2**16, 5]
    assert answer.json()["versions"][1] == ["x" * 10_000, n]
