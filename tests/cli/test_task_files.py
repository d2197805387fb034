"""`rollyard validate` and the control plane read every file alike, and say the same of it."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from rollyard.errors import LookupFailed
from rollyard.jobs.manifests import check_file, read_tasks
from rollyard_api.core.codec import unpack
from rollyard_api.core.problems import Invalid
from rollyard_api.jobs.allow_lists import AllowList
from rollyard_api.jobs.task_reader import TaskFileLimits, TaskReader
from rollyard_crds import Task
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks.task_list import TaskListError
from rollyard_testing.manifests import job_manifest

BLOB = f"blob:sha256:{'0' * 64}"
BOM = b"\xef\xbb\xbf"
TASKS = [{"id": f"t{i}", "prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(3)]
CSV = b"id,prompt,answer\n" + b"".join(b"t%d,%d + 1?,%d\n" % (i, i, i + 1) for i in range(3))
GROWTH_MIB = 300


def plain(task: Task) -> dict[str, Any]:
    return task.model_dump(mode="json", exclude_none=True, exclude_defaults=True)


def lines(end: str = "\n", tasks: Any = TASKS) -> bytes:
    return "".join(json.dumps(task) + end for task in tasks).encode()


def in_parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    parquet.write_table(arrow.table(columns), file)
    return file.getvalue()


COLUMNS = {key: [task[key] for task in TASKS] for key in TASKS[0]}
GOOD = {
    "lines": lines(),
    "lines-crlf": lines("\r\n"),
    "lines-cr": lines("\r"),
    "bom": BOM + lines(),
    "gzip": gzip.compress(lines()),
    "members": gzip.compress(lines()[:30]) + gzip.compress(lines()[30:]),
    "bzip2": bz2.compress(lines()),
    "xz": lzma.compress(lines()),
    "plain.gz": lines(),
    "plain.jsonl.xz": lines(),
    "list": json.dumps(TASKS).encode(),
    "list.json": json.dumps(TASKS, indent=4).encode(),
    "list-bom.gz": gzip.compress(BOM + json.dumps(TASKS).encode()),
    "table.csv": CSV,
    "table-bom": BOM + CSV.replace(b"\n", b"\r\n"),
    "table.xz": lzma.compress(CSV),
    "rows.parquet": in_parquet(**COLUMNS),
    "parquet": in_parquet(
        id=arrow.array(COLUMNS["id"]).dictionary_encode(),
        prompt=arrow.array(COLUMNS["prompt"], arrow.large_string()),
        answer=COLUMNS["answer"],
    ),
}
BAD = {
    "empty": b"",
    "blank": b"\n \n",
    "no-list": b"[]",
    "a-broken-line": lines() + b'{"id": \n',
    "no-objects": b'[1, "x", {"id": "a", "prompt": "?"}]',
    "twice": lines() + lines(),
    "unknown": b'[{"id": "a", "promt": "?"}]',
    "unclosed": json.dumps(TASKS).encode()[:-1],
    "several-lines": json.dumps(TASKS[0], indent=1).encode(),
    "a-bom-within": lines() + BOM + lines(),
    "utf-16": CSV.decode().encode("utf-16"),
    "latin": b'{"id": "a", "prompt": "\xe9"}\n',
    "half": b'{"id": "a", "prompt": "\\ud800"}\n',
    "deep": b'{"id": "a", "prompt": ' + b"[" * 5000 + b"\n",
    "cut.gz": gzip.compress(lines())[:-9],
    "zstd": b"\x28\xb5\x2f\xfd" + bytes(20),
    "zip": b"PK\x03\x04" + bytes(20),
    "cells": CSV + b"t4,?\n",
    "a-quote": CSV + b't4,5" x,1\n',
    "columns": b"id,prompt,id\na,?,b\n",
    "cut.parquet": in_parquet(**COLUMNS)[:-9],
    "parquet.gz": gzip.compress(in_parquet(**COLUMNS)),
    "row-2": in_parquet(id=["a", ""], prompt=["?", "?"]),
    "binary": in_parquet(id=["a"], prompt=[b"1 + 1?"]),
    "one-column.csv": b"prompt\n1 + 1?\n",
    "tabs.csv": CSV.replace(b",", b"\t"),
    "semicolons.csv": CSV.replace(b",", b";"),
    "null": b"null\n" + lines(),
    "yaml": b"- id: a\n  prompt: b\n",
}


async def submitted(data: bytes, **options: Any) -> list[dict[str, Any]]:
    """Return the tasks that the control plane reads from an upload.

    Raises:
        TaskListError: It refuses the file.
    """

    async def upload(_namespace: str, _sha256: str) -> AsyncGenerator[bytes, None]:
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]

    reader = TaskReader(AllowList.of([]), TaskFileLimits(), upload)
    try:
        source = TaskSource.model_validate({"url": BLOB, **options})
        return [json.loads(unpack(row.packed)) for row in await reader.read(BLOB, "default", source)]
    except Invalid as error:
        where = f"spec.tasks.url: {BLOB}: "
        raise TaskListError([problem.removeprefix(where) for problem in error.errors]) from error
    finally:
        reader.close()


@pytest.mark.parametrize("name", GOOD)
async def test_the_same_tasks(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(GOOD[name])
    assert check_file(path).good == ("3 tasks are valid",)
    assert [plain(task) for task in read_tasks(path)] == TASKS
    assert await submitted(GOOD[name]) == TASKS


@pytest.mark.parametrize("name", BAD)
async def test_the_same_problems(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(BAD[name])
    report = check_file(path)
    with pytest.raises(TaskListError) as refused:
        await submitted(BAD[name])
    assert (report.good, list(report.problems)) == ((), refused.value.problems)


async def test_columns_of_parquet(tmp_path: Path) -> None:
    """Maps become objects, and what JSON has no form for becomes a text."""
    texts = arrow.map_(arrow.string(), arrow.string())
    message = arrow.struct([("role", arrow.string()), ("content", arrow.large_string())])
    metadata = {
        "map": arrow.array([[("a", "1"), ("b", None)], []], texts),
        "inner": arrow.array([[{"m": [("k", "v")]}], None], arrow.list_(arrow.struct([("m", texts)]))),
        "price": arrow.array([Decimal("1.50"), None]),
        "seen": arrow.array([0, None], arrow.timestamp("s")),
        "raw": arrow.array([b"\xff\x00", None]),
        "big": arrow.array([2**64 - 1, 0], arrow.uint64()),
    }
    columns = [arrow.field(name, column.type) for name, column in metadata.items()]
    chats = [[{"role": "user", "content": "?"}], [{"role": "user", "content": "!"}]]
    data = in_parquet(
        id=["a", "b"],
        messages=arrow.array(chats, arrow.large_list(message)),
        metadata=arrow.StructArray.from_arrays(list(metadata.values()), fields=columns),
    )
    path = tmp_path / "rows"
    path.write_bytes(data)
    first, second = await submitted(data)
    assert [plain(task) for task in read_tasks(path)] == [first, second]
    assert first["messages"] == chats[0]
    assert first["metadata"] == {
        "map": {"a": "1", "b": None}, "inner": [{"m": {"k": "v"}}], "price": "1.50",
        "seen": "1970-01-01 00:00:00", "raw": {"base64": "/wA="}, "big": 2**64 - 1,
    }  # fmt: skip
    assert second["metadata"]["map"] == {}


async def test_a_map_whose_keys_are_no_texts(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    column = arrow.array([[(b"k", "v")]], arrow.map_(arrow.binary(), arrow.string()))
    path.write_bytes(in_parquet(id=["a"], prompt=["?"], metadata=column))
    problem = "the Parquet file has a map whose keys are neither texts nor numbers"
    assert check_file(path).problems == (problem,)
    with pytest.raises(TaskListError, match=problem):
        await submitted(path.read_bytes())


JOB = job_manifest("j", {"tasks": {"stream": True}, "handler": "math", "agent": {"type": "oracle"}})


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (json.dumps(JOB), "RolloutJob 'j' is valid"),
        (json.dumps(JOB, indent=1), "RolloutJob 'j' is valid"),
        ("# a job\n\n---\n" + json.dumps(JOB), "RolloutJob 'j' is valid"),
        ("spec: {}\napiVersion: x\n", "kind: must be one of"),
        ("{apiVersion: x,\n kind: Y}", "kind: must be one of"),
        ("a: 1\nb: 2\n", "kind: must be one of"),
        (json.dumps({**TASKS[0], "prompt": "What is\napiVersion: 1?"}), "1 tasks are valid"),
        ('{"id": "a", "prompt": "{apiVersion: 1}"}\n{"id"', "line 2: not valid JSON"),
        ("apiVersion,prompt\na,b\n", "row 1: is not a task; rows with prompt are read by"),
        ("question;answer\n1+1;2\n", "line 1: not valid JSON"),
        ("prompt\nsay 5\n", "line 1: not valid JSON"),
    ],
)
def test_the_content_tells_manifests_from_tasks(text: str, first: str, tmp_path: Path) -> None:
    for name in ("x.yaml", "x.json", "x.csv"):
        path = tmp_path / name
        path.write_text(text)
        report = check_file(path)
        assert (report.problems or report.good)[0].startswith(first)


@pytest.mark.parametrize("form", ["lines", "list"])
def test_large_rows_take_bounded_memory(form: str, tmp_path: Path) -> None:
    """Rows of 60 MiB: a task with large tests, and one with a large column that tasks do not have.

    Each letter of a text with one that is beyond ASCII takes two bytes or more in memory.
    """
    cases = [{"input": "7 " * (8 << 20), "output": "1"}] * 3 + [{"input": "8" * (12 << 20), "output": "1"}]
    rows = [
        {"id": "a", "prompt": "≤ 😀", "tests": {"cases": cases}},
        {"id": "b", "prompt": "?", "x": "y" * (60 << 20)},
        {"id": "a", "prompt": "?"},
    ]
    begin, between, end = ("[", ",", "]") if form == "list" else ("", "\n", "")
    path = tmp_path / "rows"
    with path.open("w") as file:
        for place, row in enumerate(rows):
            file.write((between if place else begin) + json.dumps(row, ensure_ascii=False))
        file.write(end)
    # What `resource` says of a process begins with the peak of the one that started it.
    program = f"""
from pathlib import Path
from rollyard.jobs.manifests import check_file

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM:"))

before = peak()
print(*check_file(Path({str(path)!r})).problems)
print(peak() - before)
"""
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    problems, grown = said.stdout.splitlines()
    unit = "item" if form == "list" else "line"
    assert problems.startswith(f"{unit} 2: x: unknown field")
    assert f"{unit} 3: id: 'a' stands already on {unit} 1" in problems
    assert int(grown) < GROWTH_MIB


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    os.mkfifo(path)
    for check in (check_file, read_tasks):
        with pytest.raises(LookupFailed, match=r"tasks\.jsonl: must be a file, and is a pipe or a device"):
            check(path)


def test_tasks_are_read_again_at_each_access(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(lines())
    tasks = read_tasks(path)
    assert tasks[1:][0] == tasks[1] == Task.model_validate(TASKS[1])
    assert [task.id for task in tasks] == [task["id"] for task in TASKS]
