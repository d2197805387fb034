"""Cursors that readers acknowledge: kept with the job, in one direction, and for one reader at a time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import sqlalchemy as sa
from rollyard_api.core.problems import StorageFull
from rollyard_api.storage.schema import cursors
from rollyard_api.trajectories import acknowledged
from rollyard_testing.api.plane import Worker, make_manifest, serving

PATH = "/v1/rolloutjobs/job"


@pytest.fixture
async def ended(served: Any) -> Any:
    """Yield a control plane with a job `job` of six groups of two rollouts, all of which have ended.

    So have those of a job `other`, which has two such groups.
    """
    for name, count in (("other", 2), ("job", 6)):
        tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(count)]}
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(name, tasks=tasks, samplesPerTask=2))
    informative = ("t1", "t4")
    await Worker(served.worker).finish_all(
        lambda lease: float(lease["group_id"] in informative and lease["sample_index"])
    )
    return served


async def after_each(http: Any, what: str, path: str = PATH, **query: Any) -> list[str]:
    """Return the cursor after each result of the first page."""
    answer = await http.get(f"{path}/{what}", params={"limit": 256, **query})
    begin, _, steps = answer.headers["rollyard-cursors"].partition(";")
    found, at = [], 0
    for step in steps.split(",") if steps else []:
        at += int(step)
        found.append(f"{begin}{at}")
    return found


async def put(http: Any, name: str, cursor: str, path: str = PATH, **body: Any) -> Any:
    return await http.put(f"{path}/cursors/{name}", json={"cursor": cursor, **body})


async def kept(http: Any, path: str = PATH) -> dict[str, str]:
    """Return the cursors that are kept of a job, by name."""
    items = (await http.get(f"{path}/cursors")).json()["items"]
    return {item["name"]: item["cursor"] for item in items}


def pushed(count: int) -> dict[str, Any]:
    """Return what pushes this number of tasks to a stream."""
    return {"tasks": [{"id": f"t{i}", "prompt": "p"} for i in range(count)]}


@pytest.mark.parametrize("what", ["trajectories", "groups"])
async def test_a_page_says_where_each_result_ends(ended: Any, what: str) -> None:
    every = [json.loads(line) for line in (await ended.admin.get(f"{PATH}/{what}")).content.splitlines()]
    places = await after_each(ended.admin, what)
    assert len(places) == len(every) == (12 if what == "trajectories" else 6)
    members = every if what == "trajectories" else [one for group in every for one in group["trajectories"]]
    assert len({one["id"] for one in members}) == len(members) == 12
    assert all(one["id"].startswith("job-") for one in members), "none is of another job"
    for number, cursor in enumerate(places):
        rest = await ended.admin.get(f"{PATH}/{what}", params={"cursor": cursor})
        assert [json.loads(line) for line in rest.content.splitlines()] == every[number + 1 :]


async def test_the_places_of_a_page_with_gaps(ended: Any) -> None:
    assert await after_each(ended.admin, "trajectories", status="failed") == []
    every = await ended.admin.get(f"{PATH}/groups")
    names = [json.loads(line)["group_id"] for line in every.content.splitlines()]
    places = await after_each(ended.admin, "groups")
    few = await after_each(ended.admin, "groups", informative=True)
    assert few == [place for place, name in zip(places, names, strict=True) if name in ("t1", "t4")]
    ends = {"groups": places, "trajectories": await after_each(ended.admin, "trajectories")}
    for what, query, place, finished in (
        ("trajectories", {"limit": 5}, 4, False),
        ("trajectories", {"limit": 5, "status": "failed"}, 11, True),
        ("groups", {"limit": 1, "informative": True}, names.index("t1"), False),
        ("groups", {"limit": 3, "informative": True}, 5, True),
    ):
        page = await ended.admin.get(f"{PATH}/{what}", params=query)
        assert page.headers["rollyard-cursor"] == ends[what][place], (what, query)
        assert page.headers["rollyard-finished"] == ("true" if finished else "false"), (what, query)


async def test_a_cursor_moves_forward_only(ended: Any) -> None:
    places = await after_each(ended.admin, "groups")
    missing = await ended.admin.get(f"{PATH}/cursors/trainer")
    assert (missing.status_code, missing.json()["reason"]) == (404, "CursorNotFound")
    made = await put(ended.admin, "trainer", places[2])
    assert made.status_code == 200
    assert made.json() | {"movedAt": ""} == {
        "name": "trainer", "kind": "groups", "cursor": places[2], "movedAt": "",
    }  # fmt: skip
    assert (await put(ended.admin, "trainer", places[2])).json() == made.json(), "a repeat changes nothing"
    behind = await put(ended.admin, "trainer", places[1])
    assert (behind.status_code, behind.json()["reason"]) == (409, "CursorBehind")
    assert (await ended.admin.get(f"{PATH}/cursors/trainer")).json() == made.json()
    assert (await put(ended.admin, "trainer", places[0], rewind=True)).json()["cursor"] == places[0]
    other = (await after_each(ended.admin, "trajectories"))[0]
    differs = await put(ended.admin, "trainer", other)
    assert (differs.status_code, differs.json()["reason"]) == (409, "CursorKindDiffers")
    await put(ended.admin, "logger", other)
    listed = (await ended.admin.get(f"{PATH}/cursors")).json()["items"]
    assert [(item["name"], item["cursor"]) for item in listed] == [("logger", other), ("trainer", places[0])]
    assert (await ended.admin.delete(f"{PATH}/cursors/logger")).json()["deleted"] is True
    assert (await ended.admin.delete(f"{PATH}/cursors/logger")).status_code == 404


async def test_names_and_jobs_do_not_share_a_cursor(ended: Any) -> None:
    http, other = ended.admin, "/v1/rolloutjobs/other"
    places, others = await after_each(http, "groups"), await after_each(http, "groups", other)
    for name, path, place in (
        ("logger", other, others[0]),
        ("trainer", other, others[0]),
        ("logger", PATH, places[1]),
        ("trainer", PATH, places[2]),
        ("trainer", PATH, places[4]),
    ):
        assert (await put(http, name, place, path)).status_code == 200
    assert await kept(http) == {"logger": places[1], "trainer": places[4]}
    assert await kept(http, other) == {"logger": others[0], "trainer": others[0]}
    assert (await http.delete(f"{PATH}/cursors/logger")).status_code == 200
    assert await kept(http) == {"trainer": places[4]}
    assert await kept(http, other) == {"logger": others[0], "trainer": others[0]}
    foreign = await put(http, "trainer", others[1])
    assert (foreign.status_code, foreign.json()["reason"]) == (410, "CursorGone")
    last = (await after_each(http, "trajectories"))[-1]
    assert (await put(http, "reader", last)).json()["cursor"] == last, "the end of the results is no beyond"


async def test_of_two_readers_with_one_name_the_second_is_told(ended: Any) -> None:
    places = await after_each(ended.admin, "groups")
    assert (await put(ended.admin, "trainer", places[0], expected="")).status_code == 200
    moved = [put(ended.admin, "trainer", place, expected=places[0]) for place in places[1:5]]
    answers = await asyncio.gather(*moved)
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    assert {a.json()["reason"] for a in answers if a.status_code == 409} == {"CursorMoved"}
    (won,) = [answer.json()["cursor"] for answer in answers if answer.status_code == 200]
    again = await put(ended.admin, "trainer", won, expected=places[0])
    assert again.status_code == 200, "the repeat of a call whose answer was lost"
    same_number = (await after_each(ended.admin, "trajectories"))[places.index(won)]
    for expected in ("", same_number):
        first = await put(ended.admin, "trainer", places[5], expected=expected)
        assert (first.status_code, first.json()["reason"]) == (409, "CursorMoved"), expected
    unknown = await put(ended.admin, "newcomer", places[1], expected=places[0])
    assert (unknown.status_code, unknown.json()["reason"]) == (409, "CursorMoved"), "there is none"
    back = await put(ended.admin, "trainer", places[0], expected=places[5], rewind=True)
    assert (back.status_code, back.json()["reason"]) == (409, "CursorMoved"), "rewinding does not replace it"
    back = await put(ended.admin, "trainer", places[0], expected=won)
    assert (back.status_code, back.json()["reason"]) == (409, "CursorBehind"), "nor does it replace rewinding"
    assert await kept(ended.admin) == {"trainer": won}


async def test_what_is_no_cursor_of_this_job_is_refused(ended: Any) -> None:
    places = await after_each(ended.admin, "groups")
    (begin, _, _) = places[0].rpartition(".")
    for cursor in ("7", "v1", "v1.g", "nonsense", begin, f"{begin}.x", places[0].replace(".g.", ".r."), "é"):
        refused = await put(ended.admin, "trainer", cursor)
        assert (refused.status_code, refused.json()["reason"]) == (400, "CursorInvalid"), cursor
    past = await put(ended.admin, "trainer", f"{begin}.7")
    assert (past.status_code, past.json()["reason"]) == (409, "CursorBeyondEnd")
    for body in ({}, {"cursor": ""}, {"cursor": 7}, {"cursor": places[0], "rewind": "yes"}, {"x": 1}):
        assert (await ended.admin.put(f"{PATH}/cursors/trainer", json=body)).status_code == 422, body
    assert (await ended.admin.get(f"{PATH}/cursors")).json()["items"] == []
    await put(ended.admin, "trainer", places[3])
    await ended.admin.delete(PATH)
    assert (await ended.admin.get(f"{PATH}/cursors/trainer")).json()["reason"] == "JobNotFound"
    await ended.admin.post("/v1/rolloutjobs", json=make_manifest())
    assert (await ended.admin.get(f"{PATH}/cursors/trainer")).json()["reason"] == "CursorNotFound"
    gone = await put(ended.admin, "trainer", places[3])
    assert (gone.status_code, gone.json()["reason"]) == (410, "CursorGone")


async def test_cursors_are_bounded_and_go_with_their_job(ended: Any) -> None:
    place = (await after_each(ended.admin, "groups"))[0]
    for number in range(acknowledged.MAX_CURSORS):
        assert (await put(ended.admin, f"c{number}", place)).status_code == 200
    full = await put(ended.admin, "one-more", place)
    assert (full.status_code, full.json()["reason"]) == (409, "TooManyCursors")
    assert (await put(ended.admin, "c7", place)).status_code == 200
    others = await after_each(ended.admin, "groups", "/v1/rolloutjobs/other")
    assert (await put(ended.admin, "c7", others[0], "/v1/rolloutjobs/other")).status_code == 200
    await ended.plane.archive.flush()
    await ended.admin.delete(PATH)
    await ended.plane.sweep()

    def count(conn: Any) -> int:
        return int(conn.execute(sa.select(sa.func.count()).select_from(cursors)).scalar_one())

    assert await ended.plane.database.read(count) == 1, "the other job's is kept"


async def test_a_stream_whose_results_nobody_reads_takes_no_more(settings: Any) -> None:
    async with serving(settings, max_unread=6) as served:
        http, worker = served.admin, Worker(served.worker)
        spec = {"tasks": {"stream": True}, "samplesPerTask": 2}
        await http.post("/v1/rolloutjobs", json=make_manifest(**spec))
        assert (await http.post(f"{PATH}/tasks", json=pushed(3))).status_code == 200
        assert await worker.finish_all() == 6
        full = await http.post(f"{PATH}/tasks", json=pushed(4))
        assert (full.status_code, full.json()["reason"]) == (409, "ResultsUnread")
        assert "about 6 ended rollouts" in full.json()["detail"]
        again = await http.post(f"{PATH}/tasks", json=pushed(3))
        assert again.json() == {"accepted": 0, "repeated": 3}, "a repeat is no further task"
        places = await after_each(http, "groups")
        assert (await http.post(f"{PATH}/tasks", json=pushed(4))).status_code == 409, "reading takes a cursor"
        await http.get(f"{PATH}/groups", params={"cursor": places[0]})
        assert (await http.post(f"{PATH}/tasks", json=pushed(4))).status_code == 200
        assert await worker.finish_all() == 2
        assert (await http.post(f"{PATH}/tasks", json=pushed(5))).status_code == 409
        await put(http, "trainer", places[2])
        assert (await http.post(f"{PATH}/tasks", json=pushed(5))).status_code == 200
        await http.get(f"{PATH}/groups", params={"cursor": ""})
        assert (await http.post(f"{PATH}/tasks", json=pushed(6))).status_code == 200, "it was read before"
        spec["dynamicSampling"] = {"targetGroups": 3, "minStd": 0}
        steps = make_manifest(**spec)
        steps["metadata"]["name"] = "steps"
        await http.post("/v1/rolloutjobs", json=steps)
        path = "/v1/rolloutjobs/steps"
        await http.post(f"{path}/tasks", json=pushed(3))
        assert (await http.post(f"{path}/targets", json={"id": "a"})).status_code == 201
        await worker.finish_all()
        refused = await http.post(f"{path}/targets", json={"id": "b"})
        assert (refused.status_code, refused.json()["reason"]) == (409, "ResultsUnread")
        assert (await http.post(f"{path}/targets", json={"id": "a"})).status_code == 200


async def test_trajectories_that_were_read_count_for_their_stream_only(settings: Any) -> None:
    async with serving(settings, max_unread=6) as served:
        http, worker, twin = served.admin, Worker(served.worker), "/v1/rolloutjobs/twin"
        for path in (PATH, twin):
            name = path.rpartition("/")[2]
            await http.post(
                "/v1/rolloutjobs", json=make_manifest(name, tasks={"stream": True}, samplesPerTask=2)
            )
            await http.post(f"{path}/tasks", json=pushed(3))
        await worker.finish_all()
        places = await after_each(http, "trajectories")
        await http.get(f"{PATH}/trajectories", params={"cursor": places[0]})
        assert (await http.post(f"{PATH}/tasks", json=pushed(4))).status_code == 200
        assert (await http.post(f"{twin}/tasks", json=pushed(4))).status_code == 409
        await worker.finish_all()
        full = await http.post(f"{PATH}/tasks", json=pushed(5))
        assert "about 7 ended rollouts" in full.json()["detail"]
        await put(http, "trainer", places[3])
        assert (await http.post(f"{PATH}/tasks", json=pushed(5))).status_code == 200
        assert (await http.post(f"{twin}/tasks", json=pushed(4))).status_code == 409
        await worker.finish_all()
        assert (await put(http, "trainer", places[0], rewind=True)).status_code == 200
        full = await http.post(f"{PATH}/tasks", json=pushed(6))
        assert "about 6 ended rollouts" in full.json()["detail"], "a reader that goes back has read them"


async def test_a_full_database_does_not_prevent_reading(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(settings, max_unread=1) as served:
        await served.admin.post("/v1/rolloutjobs", json=make_manifest())
        await Worker(served.worker).finish_all()
        place = (await after_each(served.admin, "groups"))[0]

        async def full(_op: Any) -> None:
            raise StorageFull("there is no space for the database")

        monkeypatch.setattr(served.plane.database, "write", full)
        answer = await served.admin.get(f"{PATH}/groups", params={"cursor": place})
        assert (answer.status_code, len(answer.content.splitlines())) == (200, 1)
        assert (await put(served.admin, "trainer", place)).status_code == 507
        monkeypatch.undo()
