"""Rollouts piece by piece, while they run and afterwards; search; time; and the events of the fleet."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from rollyard_api.core import cursors
from rollyard_api.trajectories import words
from rollyard_api.views import keyset
from rollyard_api.views.fleet.feed import BUFFER
from rollyard_api.views.job.lists import GroupFilter, RolloutFilter
from rollyard_testing.api.plane import Worker, make_manifest
from rollyard_testing.manifests import pool_manifest
from rollyard_testing.pace import patience

TEXT = "x" * 50_000
MESSAGES = [
    {"role": "user", "content": "Solve \u202ethis\x1b[31m"},
    {"role": "assistant", "content": "Zebra first", "tool_calls": None},
    {"role": "tool", "content": TEXT, "name": "bash"},
    {"role": "assistant", "content": "done"},
]
TURNS = [
    {
        "segment": 0,
        "start": 0,
        "end": 2,
        "finish_reason": "tool_calls",
        "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}, "seconds": 0.5}],
        "model_seconds": 1.0,
    },
    {"segment": 0, "start": 4, "end": 6, "finish_reason": "stop"},
]
SEGMENT = {
    "prompt_ids": [0, 1, 2],
    "response_ids": [3, 4, 5, 5, 6, 7],
    "loss_mask": [1, 1, 0, 0, 1, 1],
    "logprobs": [-0.5, -20.0, 0.0, 0.0, 0.0, -1.5],
    "policy_versions": ["v1", "v1", "", "", "v2", "v2"],
}
VOCABULARY = {"H": 0, "e": 1, "Ġw": 2, "Ã": 3, "©": 4, "ok": 5, "Ċ": 6}


async def a_rollout(served: Any, **spec: Any) -> list[str]:
    """Run a job of one group with two samples, and return the ids of its rollouts."""
    spec = {"tasks": {"inline": [{"id": "t0", "prompt": "p"}]}, "samplesPerTask": 2, **spec}
    await served.submit("job", **spec)
    worker = Worker(served.worker)
    ids = set()
    while leases := await worker.lease(init=16, run=16, eval=16):
        for lease in leases:
            ids.add(lease["rollout"])
            result = worker.result(lease)
            if lease["stage"] == "run":
                segment = dict(SEGMENT)
                if lease["sample_index"] == 1:
                    segment["response_ids"] = [3, 4, 5, 5, 0, 7]
                result["trajectory"] |= {
                    "segments": [segment],
                    "messages": MESSAGES,
                    "turns": TURNS,
                    "truncated": True,
                    "truncated_reason": "MaxTurns",
                }
            assert await worker.complete(result) == ["accepted"]
    return sorted(ids)


@pytest.fixture(params=["database", "store"])
async def ids(request: Any, served: Any, tmp_path: Path) -> list[str]:
    """Return two ended rollouts, whose records are in the database or in the trajectory store."""
    folder = tmp_path / "model"
    folder.mkdir()
    document = {
        "model": {"vocab": VOCABULARY},
        "added_tokens": [{"id": 7, "content": "<|end|>"}],
        "decoder": {"type": "ByteLevel"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    pool = pool_manifest(
        "pool",
        {
            "model": "m",
            "tokenizer": str(folder),
            "engine": {"type": "external", "external": {"urls": ["http://127.0.0.1:9"]}},
        },
    )
    made = await served.admin.post("/v1/backendpools", json=pool)
    if made.status_code != 201:
        pytest.fail(made.text)
    await served.plane.database.write(
        lambda tx: tx.conn.exec_driver_sql("UPDATE backends SET ready = true") and None
    )
    found = await a_rollout(served, backendRef={"name": "pool"})
    if request.param == "store":
        await served.plane.flush()
    return found


def path(rollout: str, piece: str) -> str:
    return f"/v1/rolloutjobs/job/rollouts/{rollout}/{piece}"


async def test_a_brief_has_all_but_tokens_and_messages(served: Any, ids: list[str]) -> None:
    found = (await served.viewer.get(path(ids[0], "brief"))).json()
    assert found["segments"] == [{"prompt": 3, "response": 6, "sampled": 4}]
    assert found["messages"] == 4
    assert (found["turns_total"], found["turns"][0]["tool_calls"][0]["name"]) == (2, "bash")
    assert "arguments" not in found["turns"][0]["tool_calls"][0]
    names = [name for name, _, _ in found["spans"]]
    assert names == ["init-queue", "init", "run-queue", "run", "eval-queue", "eval"]
    for (_, _, end), (_, begin, _) in zip(found["spans"], found["spans"][1:], strict=False):
        assert end == begin
    for stage in ("init", "run", "eval"):
        (span,) = [end - begin for name, begin, end in found["spans"] if name == stage]
        assert span == pytest.approx(found["timings"][stage]["active_seconds"], abs=0.002)
    assert "_" not in found["timings"]
    assert found["neighbours"] == {
        "sample_before": None,
        "sample_after": ids[1],
        "failed_before": None,
        "failed_after": None,
    }
    assert len(found["trace_id"]) == 32
    raw = (await served.viewer.get(f"/v1/rolloutjobs/job/rollouts/{ids[0]}")).json()
    assert "_" not in raw["timings"]
    statistics = (await served.viewer.get("/v1/rolloutjobs/job/statistics")).json()
    assert statistics["truncated"] == [{"reason": "MaxTurns", "n": 2}]
    assert (statistics["tool_calls"], statistics["turns"]) == (2, 4)


async def test_messages_come_by_range_and_are_cut(served: Any, ids: list[str]) -> None:
    first = (await served.viewer.get(path(ids[0], "messages"), params={"limit": 2})).json()
    assert (first["start"], first["total"], len(first["items"])) == (0, 4, 2)
    assert first["items"][0]["content"] == MESSAGES[0]["content"], "nothing is taken out of a text"
    call = first["items"][1]["tool_calls"][0]
    assert (call["name"], json.loads(call["arguments"]), call["seconds"]) == ("bash", {"command": "ls"}, 0.5)
    assert [item["turn"] for item in first["items"]] == [None, 0]
    rest = (await served.viewer.get(path(ids[0], "messages"), params={"start": 2, "most": 100})).json()
    tool, last = rest["items"]
    assert (tool["content"], tool["characters"], tool["cut"]) == (TEXT[:100], 50_000, True)
    assert (last["turn"], last["cut"], last["no"]) == (1, False, 3)
    asked = {"offset": 49_990, "limit": 1000}
    part = (await served.viewer.get(path(ids[0], "messages/2"), params=asked)).json()
    assert part == {"text": TEXT[49_990:], "offset": 49_990, "characters": 50_000}
    for wrong, status in (("messages/4", 404), ("messages/x", 422), ("messages/-1", 400)):
        assert (await served.viewer.get(path(ids[0], wrong))).status_code == status, wrong
    beyond = (await served.viewer.get(path(ids[0], "messages"), params={"start": 9})).json()
    assert beyond["items"] == []


async def test_tokens_come_by_range_with_texts_runs_and_logprobs(served: Any, ids: list[str]) -> None:
    found = (await served.viewer.get(path(ids[0], "tokens"))).json()
    assert found["ids"] == [0, 1, 2, 3, 4, 5, 5, 6, 7]
    assert (found["prompt"], found["total"], found["segments"]) == (3, 9, 1)
    assert found["texts"] == ["H", "e", " w", "\\xc3", "\\xa9", "ok", "ok", "\n", "<|end|>"]
    assert found["mask"] == [[0, 3], [1, 2], [0, 2], [1, 2]]
    assert found["versions"] == [["", 3], ["v1", 2], ["", 2], ["v2", 2]]
    assert list(base64.b64decode(found["logprobs"])) == [0, 0, 0, 11, 255, 0, 0, 1, 31]
    asked = {"start": 2, "limit": 3, "exact": True, "texts": False}
    part = (await served.viewer.get(path(ids[0], "tokens"), params=asked)).json()
    assert (part["ids"], part["mask"]) == ([2, 3, 4], [[0, 1], [1, 2]])
    assert (part["logprobs"], part["texts"]) == ([0.0, -0.5, -20.0], None)
    past = (await served.viewer.get(path(ids[0], "tokens"), params={"start": 5, "limit": 2})).json()
    assert (past["mask"], past["versions"]) == ([[0, 2]], [["", 2]])
    nothing = (await served.viewer.get(path(ids[0], "tokens"), params={"start": 99})).json()
    assert (nothing["ids"], nothing["mask"], nothing["total"]) == ([], [], 9)
    missing = await served.viewer.get(path(ids[0], "tokens"), params={"segment": 1})
    assert (missing.status_code, missing.json()["reason"]) == (404, "PieceNotFound")


async def test_two_rollouts_of_a_group_part_ways_at_a_token(served: Any, ids: list[str]) -> None:
    found = (await served.viewer.get(path(ids[0], "difference"), params={"other": ids[1]})).json()
    assert (found["segment"], found["position"]) == (0, 7)
    assert (found["left"]["ids"][7], found["right"]["ids"][7]) == (6, 0)
    assert (found["left"]["texts"][7], found["right"]["texts"][7]) == ("\n", "H")
    same = (await served.viewer.get(path(ids[0], "difference"), params={"other": ids[0]})).json()
    assert same["position"] is None
    unknown = await served.viewer.get(path(ids[0], "difference"), params={"other": "nobody"})
    assert unknown.status_code == 404


@pytest.mark.attack(
    "a browser runs what a policy wrote",
    boundary="viewers",
    surface="download of a record",
    stopped_by="it is a text to be saved, and its type is not guessed",
)
async def test_a_download_is_a_text(served: Any, ids: list[str]) -> None:
    answer = await served.viewer.get(f"/v1/rolloutjobs/job/rollouts/{ids[0]}", params={"download": True})
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-disposition"] == f'attachment; filename="{ids[0]}.json"'
    assert answer.json()["id"] == ids[0]


async def test_search_finds_whole_words_in_any_case(served: Any, ids: list[str]) -> None:
    await served.plane.flush()
    url = "/v1/rolloutjobs/job/rollouts"

    async def found(text: str, **params: Any) -> list[str]:
        answer = await served.viewer.get(url, params={"slim": True, "search": text, **params})
        assert answer.status_code == 200, answer.text
        return sorted(row["id"] for row in answer.json()["items"])

    assert await found("zebra") == ids
    assert await found("FIRST zebra", sort="-reward") == ids
    assert await found("zebr") == []
    assert await found("zebra nowhere") == []
    assert await found("zebra", status="failed") == []
    one = await served.viewer.get(url, params={"slim": True, "search": "zebra", "limit": 1})
    more = {"slim": True, "search": "zebra", "limit": 1, "continue": one.json()["metadata"]["continue"]}
    two = await served.viewer.get(url, params=more)
    assert {one.json()["items"][0]["id"], two.json()["items"][0]["id"]} == set(ids)
    refused = await served.viewer.get(url, params={"slim": True, "search": "% _ %' ++"})
    assert refused.status_code in (200, 400)
    refused = await served.viewer.get(url, params={"slim": True, "search": "++ --"})
    assert refused.status_code == 400
    assert "search: must have 1 to 16 words" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ("grid?limit=0", "limit"),
        ("grid?sort=best", "sort"),
        ("statistics?limit=1", "limit"),
        ("gantt?limit=0", "limit"),
        ("rollouts/r/messages?start=-1", "start"),
        ("rollouts/r/messages/first", "number"),
        ("rollouts/r/tokens?limit=0", "limit"),
        ("rollouts/r/difference", "other"),
        ("grid?search=a%00", "search"),
        ("rollouts?slim=true&reason=%00", "reason"),
        ("rollouts/r%00/brief", "rollout"),
    ],
)
async def test_a_wrong_parameter_is_refused_before_anything_is_read(
    served: Any, wrong: str, field: str
) -> None:
    answer = await served.viewer.get(f"/v1/rolloutjobs/nothing/{wrong}")
    assert answer.status_code == 422, "there is no such job, which nobody has looked for"
    assert any(field in problem for problem in answer.json()["errors"]), answer.text


async def test_a_forged_place_names_what_the_columns_hold(served: Any, ids: list[str]) -> None:
    lists: dict[str, list[tuple[str, list[Any]]]] = {
        "rollouts": [
            ("ended", [1 << 31, 1]),
            ("ended", [1, 1 << 31]),
            ("reward", [0.5, 1 << 62]),
            ("-tokens", [1 << 40, 1]),
            ("reward", [None, 1 << 31]),
        ],
        "grid": [("no", [1 << 31, 1]), ("reason", ["a\0b", 1])],
    }
    for name, places in lists.items():
        for sort, place in places:
            answer = await page_after(served, name, sort, place)
            assert (answer.status_code, answer.json().get("reason")) == (400, "CursorInvalid"), (sort, place)
    answer = await page_after(served, "rollouts", "since", [0.5, (1 << 63) - 1])
    assert answer.status_code == 200, answer.text


async def page_after(served: Any, name: str, sort: str, place: list[Any]) -> Any:
    """Return the page of a list of the job after a place that the list has not given."""
    asked = {"sort": sort} if name == "grid" else {"sort": sort, "slim": True}
    job = (await served.viewer.get("/v1/rolloutjobs/job")).json()
    filters: BaseModel = GroupFilter(sort=sort) if name == "grid" else RolloutFilter(sort=sort)
    given = cursors.text("views", job["metadata"]["uid"], keyset.encode(filters, place))
    return await served.viewer.get(f"/v1/rolloutjobs/job/{name}", params=asked | {"continue": given})


@pytest.mark.attack(
    "a pattern takes for ever, or means something to the database",
    boundary="viewers",
    surface="search and filters",
    stopped_by="texts are compared as texts; the time of a search is bounded",
)
def test_the_words_of_a_conversation_are_bounded() -> None:
    thinking = {"role": "assistant", "content": "zebra", "reasoning_content": "horse"}
    assert list(words.texts_of({"messages": [thinking]})) == ["horse", "zebra"]
    many = (f"w{number}" for number in range(1_000_000))
    assert len(words.hashes(many)) == 4 * words.MAX_WORDS
    assert words.hashes(["a" * 10_000_000]) == words.hash_of("a" * words.MAX_CHARACTERS)


async def test_the_gantt_shows_stages_over_time(served: Any, ids: list[str]) -> None:
    for sort in ("-duration", "started"):
        answer = await served.viewer.get("/v1/rolloutjobs/job/gantt", params={"sort": sort})
        items = answer.json()["items"]
        assert sorted(item["id"] for item in items) == ids
        assert [name for name, _, _ in items[0]["spans"]][-1] == "eval"
        assert "open" not in items[0]


@pytest.mark.attack(
    "the worker of one job sends turns of another job's rollout, or under an older lease",
    boundary="viewers",
    surface="running rollouts",
    stopped_by="turns count for leases that the heartbeat renews, and a token reaches its own job",
)
async def test_a_running_rollout_is_seen_as_far_as_it_has_come(served: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest())
    worker = Worker(served.worker, "w1")
    (lease, other) = await worker.lease(init=2)
    assert (await worker.heartbeat(lease, other))["watched"] == []
    url = path(lease["rollout"], "live")
    first = (await served.viewer.get(url)).json()
    assert (first["status"], first["stage"], first["worker"]) == ("leased", "init", "w1")
    assert first["turns"] == []
    assert (await worker.heartbeat(lease, other))["watched"] == [lease["rollout"]]
    turn = {"no": 0, "role": "assistant", "text": "hello", "characters": 5}
    refs = [{"rollout": one["rollout"], "token": one["token"]} for one in (lease, other)]
    beat = {"worker": "w1", "node": "n", "leases": refs, "live": [{**refs[0], "turns": [turn]}]}
    sent = await served.worker.post("/v1/leases/heartbeat", json=beat)
    assert sent.json()["watched"] == [lease["rollout"]]
    (seen,) = (await served.viewer.get(url)).json()["turns"]
    assert (seen["no"], seen["text"]) == (0, "hello")
    stale = {**refs[0], "token": refs[0]["token"] + 1, "turns": [turn | {"text": "forged"}]}
    unwatched = {**refs[1], "turns": [turn]}
    assert (
        await served.worker.post("/v1/leases/heartbeat", json=beat | {"live": [stale, unwatched]})
    ).status_code == 200
    assert (await served.viewer.get(url)).json()["turns"] == [seen]
    await worker.fail(lease)
    waits = (await served.viewer.get(url)).json()
    assert (waits["status"], waits["worker"]) == ("queued", ""), "it is in no worker's hands"
    (lease,) = [one for one in await worker.lease(init=2) if one["rollout"] == lease["rollout"]]
    anew = (await served.viewer.get(url)).json()
    assert (anew["status"], anew["worker"], anew["turns"]) == ("leased", "w1", []), "nothing of the last one"
    ref = {"rollout": lease["rollout"], "token": lease["token"]}
    live = [{**ref, "turns": [turn | {"no": 1, "text": "again"}]}]
    await served.worker.post("/v1/leases/heartbeat", json=beat | {"leases": [ref], "live": live})
    turns = (await served.viewer.get(url)).json()["turns"]
    assert [one["text"] for one in turns] == ["again"], "another attempt begins with an empty conversation"
    running = (await served.viewer.get("/v1/rolloutjobs/job/gantt")).json()["items"]
    assert running[0]["open"] is True
    await worker.fail(lease, retryable=False)
    ended = await served.viewer.get(url)
    assert (ended.status_code, ended.json()["reason"]) == (409, "RolloutEnded")
    assert (await served.viewer.get(path("nobody", "live"))).status_code == 404


async def _events(stream: Any, names: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async for data in stream:
        name, _, body = data.decode().partition("\n")
        if name.startswith("event: "):
            found[name.removeprefix("event: ")] = json.loads(body.removeprefix("data: "))
        if names <= found.keys():
            return found
    return found


@pytest.mark.attack(
    "a follower that takes nothing fills memory, or each one costs reads of the database",
    boundary="viewers",
    surface="events of the fleet",
    stopped_by="one reader for all, a bounded buffer, and the slow one is dropped",
)
async def test_followers_share_one_reader(served: Any) -> None:
    plane = served.plane
    followers = [plane.views.feed.follow(None, lambda: False) for _ in range(3)]
    followers.append(plane.views.feed.follow(("default", "other"), lambda: False))
    for follower in followers:
        assert (await anext(follower)).startswith(b"event: overview")
    await plane.views.feed.tick()
    before = plane.views.fleet.reads
    await served.admin.post("/v1/rolloutjobs", json=make_manifest())
    worker = Worker(served.worker)
    while leases := await worker.lease(init=9, run=9, eval=9):
        await worker.complete(*map(worker.result, leases))
    await plane.views.folding.round()
    await plane.views.feed.tick()
    assert plane.views.fleet.reads == before + 1
    for follower in followers[:3]:
        found = await asyncio.wait_for(_events(follower, {"overview", "job", "ended"}), patience(10))
        assert found["job"]["succeeded"] == 2
        assert (len(found["ended"]["rollouts"]), found["ended"]["more"]) == (2, 0)
    assert (await anext(followers[3])).startswith(b"event: overview")
    await plane.flush()
    await served.admin.delete("/v1/rolloutjobs/job")
    await plane.views.feed.tick()
    found = await asyncio.wait_for(_events(followers[0], {"gone"}), patience(10))
    assert found["gone"] == {"namespace": "default", "name": "job"}
    for _ in range(BUFFER + 5):
        plane.views.feed._tell("x", {})
    late = [data async for data in followers[1]]
    assert late[-1] == b'event: dropped\ndata: {"reason":"SlowConsumer"}\n\n'
    for follower in followers:
        await follower.aclose()
    reads = plane.views.fleet.reads
    await plane.views.feed.tick()
    assert plane.views.fleet.reads == reads, "nothing is read while nobody follows"


async def test_the_stream_of_the_fleet_answers(served: Any) -> None:
    refused = await served.viewer.get("/v1/events", params={"job": "x"})
    assert refused.status_code == 400
    refused = await served.worker.get("/v1/events")
    assert refused.status_code == 403
