"""Task files in other formats, as uploads: JSON lines and Parquet, through the control plane's reader."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from rollyard_api.core.codec import unpack
from rollyard_api.core.problems import Invalid
from rollyard_api.jobs.allow_lists import AllowList
from rollyard_api.jobs.task_reader import TaskFileLimits, TaskReader
from rollyard_api.jobs.tasks import read_lines
from rollyard_crds import Task
from rollyard_crds.fields.harbor import HarborOptions
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks.harbor.archive import pack
from rollyard_testing.api.plane import Worker

BLOB = f"blob:sha256:{'0' * 64}"
PIECE = 700


def row(i: int, **change: Any) -> dict[str, Any]:
    return {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": f"{i}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"split": "train", "index": i},
        **change,
    }


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in rows).encode()


def in_parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), file, row_group_size=100)
    return file.getvalue()


async def read(data: bytes, limits: TaskFileLimits | None = None, **options: Any) -> list[dict[str, Any]]:
    taken = 0

    async def upload(_namespace: str, _sha256: str) -> AsyncGenerator[bytes, None]:
        nonlocal taken
        for taken in range(0, len(data), PIECE):
            yield data[taken : taken + PIECE]

    reader = TaskReader(AllowList.of([]), limits or TaskFileLimits(), upload)
    try:
        source = TaskSource.model_validate({"url": BLOB, "format": "verl", **options})
        rows = await reader.read(BLOB, "default", source)
    finally:
        reader.close()
    found = [orjson.loads(unpack(each.packed)) for each in rows]
    assert [task["id"] for task in found] == [each.id for each in rows]
    return found


@pytest.mark.parametrize("form", [jsonl, in_parquet, lambda rows: gzip.compress(jsonl(rows))])
async def test_every_form_gives_the_same_tasks(form: Any) -> None:
    found = await read(form([row(i) for i in range(250)]))
    assert [task["answer"] for task in found] == [str(i) for i in range(250)]
    assert found[3]["id"] == "gsm8k/train/3"


@pytest.mark.parametrize(("form", "unit"), [(jsonl, "line"), (in_parquet, "row")])
async def test_a_refused_row(form: Any, unit: str) -> None:
    rows = [row(0), row(1), row(2, reward_model={"style": "rule", "ground_truth": None})]
    with pytest.raises(Invalid, match=rf"{unit} 3: reward_model\.ground_truth: is missing"):
        await read(form(rows))


@pytest.mark.parametrize("form", [jsonl, in_parquet])
async def test_options_select_tasks_and_repeat_them(form: Any) -> None:
    data = form([row(i % 40, extra_info={"split": "train", "index": i % 40}) for i in range(400)])
    found = await read(data, deduplicate=True, shuffle={"seed": 3}, limit=8, epochs=2)
    assert len(found) == len({task["id"] for task in found}) == 16
    assert sorted(task["answer"] for task in found[:8]) == sorted(task["answer"] for task in found[8:])
    assert found[8]["id"].endswith(":epoch2")


async def test_rows_after_the_limit_are_not_read() -> None:
    assert len(await read(jsonl([row(0), row(1)]) + b"{broken", limit=2)) == 2


async def test_a_parquet_file_longer_than_allowed() -> None:
    data = in_parquet([row(i) for i in range(250)])
    with pytest.raises(Invalid, match="holds more than 2000 bytes"):
        await read(data, TaskFileLimits(file_bytes=2000))


async def test_a_parquet_file_that_is_not_read_in_time() -> None:
    with pytest.raises(Invalid, match=r"not read within 0\.01 seconds"):
        await read(in_parquet([row(0)]), TaskFileLimits(seconds=0.01))


async def test_a_damaged_parquet_file() -> None:
    with pytest.raises(Invalid, match="the Parquet file is damaged"):
        await read(in_parquet([row(0)])[:-6])


async def test_the_rows_before_the_damage_of_a_parquet_file_are_read() -> None:
    data = in_parquet([row(i) for i in range(250)])
    second = parquet.ParquetFile(io.BytesIO(data)).metadata.row_group(1).column(0).dictionary_page_offset
    damaged = data[:second] + bytes(100) + data[second + 100 :]
    assert len(await read(damaged, limit=64)) == 64
    with pytest.raises(Invalid, match="the Parquet file is damaged"):
        await read(damaged)


async def test_a_format_that_is_not_installed() -> None:
    with pytest.raises(Invalid, match="no task format 'arc' is installed"):
        await read(jsonl([row(0)]), format="arc")


def task_folder(name: str, toml: str) -> dict[str, Any]:
    files = {"task.toml": toml, "instruction.md": "Do it.", "tests/test.sh": "true"}
    return {"path": name, "task_binary": pack({path: (text.encode(), False) for path, text in files.items()})}


async def test_what_a_job_says_about_its_task_folders() -> None:
    rows = [task_folder("a", "[environment]\nallow_internet = true"), task_folder("b", "cpus = 2")]
    options = {"network": "ignore", "rewardKey": "accuracy"}
    found = await read(jsonl(rows), format="harbor", harbor=options)
    first, second = (Task.model_validate(task) for task in found)
    for task in (first, second):
        assert task.harbor is not None
        assert task.harbor.options == HarborOptions(network="ignore", reward_key="accuracy")
    assert first.sandbox.allowed_hosts == []
    assert first.metadata == {"harbor_ignored": ["environment.allow_internet"]}
    assert second.metadata == {"harbor_unknown": {"cpus": None}}
    refused = {"path": "c", "refused": "a: is a symbolic link"}
    with pytest.raises(Invalid) as problems:
        await read(jsonl([*rows, refused]), format="harbor")
    shown = "\n".join(problems.value.errors)
    assert "line 1: a: environment.allow_internet: asks for every host" in shown
    assert "line 3: c: a: is a symbolic link" in shown


async def test_archives_of_task_folders_in_a_binary_column() -> None:
    rows = [task_folder("a", "[environment]\ncpus = 2")]
    binary = [{**each, "task_binary": base64.b64decode(each["task_binary"])} for each in rows]
    found = await read(in_parquet(binary), format="harbor")
    assert found == await read(jsonl(rows), format="harbor")


def test_line_separators_of_unicode_are_letters_of_pushed_tasks() -> None:
    rows = [{"id": "a", "prompt": "1\u2028\x85?"}, {"id": "b", "prompt": "?"}]
    found = read_lines("\r\n".join(json.dumps(each, ensure_ascii=False) for each in rows))
    assert [orjson.loads(unpack(each.packed)) for each in found] == rows


async def test_a_task_of_60_mebibytes_reaches_its_worker_alone(served: Any) -> None:
    cases = [{"input": "7 " * (8 << 20), "output": "1"}] * 3 + [{"input": "8" * (12 << 20), "output": "1"}]
    rows = [{"id": "small", "prompt": "?"}, {"id": "large", "prompt": "?", "tests": {"cases": cases}}]
    data = gzip.compress(json.dumps(rows).encode(), 1)
    digest = hashlib.sha256(data).hexdigest()
    url = (await served.admin.put(f"/v1/blobs/{digest}", content=data)).json()["url"]
    await served.submit(tasks={"url": url})
    worker = Worker(served.worker)
    found = [await worker.lease(init=4) for _ in rows]
    assert [[lease["task"] for lease in leases] for leases in found] == [[row] for row in rows]
