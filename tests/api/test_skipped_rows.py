"""Rows of a task list that the control plane skips, and what their job says of them."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from rollyard_tasks import file_rows, row_texts, task_file
from rollyard_testing.api.plane import make_manifest, serving


def line(name: str) -> str:
    return json.dumps({"id": name, "prompt": "?", "test_script": "true"})


LONGEST = 1 << 20
LONG = "x" * (LONGEST + 1)
ROWS = [line("a"), "{", line("b"), LONG, line("b"), '{"id": "c"}', line("d")]
SKIPPED = {
    "count": 4,
    "read": 7,
    "reasons": [
        "line 2: not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        f"line 4: longer than {LONGEST} bytes",
        "line 5: id: 'b' stands already on line 3",
        "line 6: task: give exactly one of 'prompt' and 'messages'",
    ],
}


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (file_rows, row_texts):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", LONGEST)


async def uploaded(served: Any, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    answer = await served.admin.put(f"/v1/blobs/{digest}", content=data)
    assert answer.status_code in (200, 201), answer.text
    return str(answer.json()["url"])


async def submitted(served: Any, data: bytes) -> Any:
    source = {"url": await uploaded(served, data), "onBadRow": "skip"}
    return await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=source))


async def test_a_job_says_which_rows_were_skipped_and_a_restart_keeps_it(settings: Any) -> None:
    data = gzip.compress("\n".join(ROWS).encode())
    async with serving(settings) as served:
        made = await submitted(served, data)
        assert made.status_code == 201, made.text
        assert made.json()["status"]["skippedRows"] == SKIPPED
        assert made.json()["status"]["counts"]["total"] == 3
        again = await submitted(served, data)
        assert again.status_code == 200, "the same spec is the same job"
        assert again.json()["status"]["skippedRows"] == SKIPPED
        refusing = make_manifest("other", tasks={"url": await uploaded(served, data)})
        refused = await served.admin.post("/v1/rolloutjobs", json=refusing)
        assert refused.status_code == 422
        assert "line 2: not valid JSON" in refused.text
    async with serving(settings) as served:
        # The driver's report does not replace what only the control plane knows.
        forged = {"phase": "Run", "conditions": [], "skippedRows": {"count": 1, "read": 1, "reasons": ["x"]}}
        answer = await served.driver.put("/v1/rolloutjobs/job/status", json=forged)
        assert answer.status_code == 200, answer.text
        found = (await served.admin.get("/v1/rolloutjobs/job")).json()["status"]
        assert (found["phase"], found["skippedRows"]) == ("Run", SKIPPED)


async def test_a_job_without_bad_rows_says_nothing(served: Any) -> None:
    made = await submitted(served, line("a").encode())
    assert made.status_code == 201, made.text
    assert "skippedRows" not in made.json()["status"]


async def test_rows_of_parquet(served: Any) -> None:
    rows = [{"id": "a", "prompt": "?"}, {"id": "a b", "prompt": "?"}, {"id": "c", "prompt": "?"}]
    file = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), file)
    made = await submitted(served, file.getvalue())
    assert made.status_code == 201, made.text
    skipped = made.json()["status"]["skippedRows"]
    assert (skipped["count"], skipped["read"]) == (1, 3)
    assert skipped["reasons"][0].startswith("row 2: id: ")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{x\n{x\n", "no task is left: 2 of 2 rows"),
        (f"{line('a')}\n".encode("utf-16"), "is UTF-16 text"),
        (gzip.compress(line("a").encode() * 100)[:-9], "the compressed file is damaged"),
        (bz2.compress(f"{line('a')}\n".encode())[:-4], "the compressed file is damaged"),
    ],
    ids=["no task", "encoding", "gzip", "bzip2"],
)
async def test_what_is_not_a_fault_of_one_row_is_refused(served: Any, data: bytes, why: str) -> None:
    answer = await submitted(served, data)
    assert (answer.status_code, answer.json()["reason"]) == (422, "InvalidTasks"), answer.text
    assert why in answer.text
    assert (await served.admin.get("/v1/rolloutjobs/job")).status_code == 404


@pytest.mark.attack(
    "a file of nothing but bad rows, or of huge ones, fills memory, the database or answers",
    boundary="control plane",
    surface="`tasks.onBadRow: skip`",
    stopped_by="ten reasons of 256 characters are kept, and rows that are skipped count as rows of the file",
)
async def test_skipped_rows_count_as_lines_of_the_file(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_file, "MAX_TASKS", 10)
    for bad, status in ((9, 201), (10, 422)):
        answer = await submitted(served, f"{line('a')}\n".encode() + b"{\n" * bad)
        assert answer.status_code == status, answer.text
        await served.admin.delete("/v1/rolloutjobs/job")
    assert "holds more than 10 rows" in answer.text


async def test_a_target_counts_the_tasks_that_are_left(served: Any) -> None:
    url = await uploaded(served, "\n".join(ROWS).encode())
    for target, status in ((4, 422), (3, 201)):
        spec = {"samplesPerTask": 2, "dynamicSampling": {"targetGroups": target}}
        job = make_manifest(tasks={"url": url, "onBadRow": "skip"}, **spec)
        answer = await served.admin.post("/v1/rolloutjobs", json=job)
        assert answer.status_code == status, answer.text


async def test_a_driver_says_which_rows_of_a_config_map_it_skipped(served: Any) -> None:
    job = make_manifest(tasks={"configMapRef": {"name": "tasks"}, "onBadRow": "skip"})
    body = {"manifest": job, "tasks": [{"id": "a", "prompt": "?"}], "skipped": SKIPPED}
    for status in (201, 200):
        made = await served.driver.put("/v1/rolloutjobs/job", json=body)
        assert made.status_code == status, made.text
        assert made.json()["status"]["skippedRows"] == SKIPPED
    reasons = ["x"] * 11
    many = await served.driver.put(
        "/v1/rolloutjobs/job", json={**body, "skipped": {"count": 11, "read": 11, "reasons": reasons}}
    )
    assert many.status_code == 422
    other = {"manifest": make_manifest("other"), "skipped": SKIPPED}
    stray = await served.driver.put("/v1/rolloutjobs/other", json=other)
    assert stray.json()["errors"] == ["skipped: belong to a job whose spec.tasks is a configMapRef"]
