"""What the author of a job tries with the rows of a task file in another format."""

from __future__ import annotations

import io
import json
import resource
from collections.abc import AsyncGenerator
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from rollyard_api.core.problems import Invalid
from rollyard_api.jobs.task_reader import TaskFileLimits, TaskReader
from rollyard_api.jobs.task_sources import AllowList
from rollyard_crds.rolloutjob import TaskSource

SECRET = "hunter2-is-the-secret"
BLOB = f"blob:sha256:{'0' * 64}"


def table(text: str, rows: int) -> bytes:
    """Return a small Parquet file of tasks whose prompts are the same text."""
    prompts = arrow.DictionaryArray.from_arrays(arrow.array([0] * rows, arrow.int32()), arrow.array([text]))
    ids = [f"t{i}" for i in range(rows)]
    file = io.BytesIO()
    parquet.write_table(arrow.table({"id": ids, "prompt": prompts}), file, compression="zstd")
    return file.getvalue()


async def refusal(data: bytes, name: str) -> str:
    async def upload(_namespace: str, _sha256: str) -> AsyncGenerator[bytes, None]:
        yield data

    reader = TaskReader(AllowList.of([]), TaskFileLimits(file_bytes=64 << 20), upload)
    try:
        with pytest.raises(Invalid) as refused:
            await reader.read(BLOB, "default", TaskSource(url=BLOB, format=name))
    finally:
        reader.close()
    return refused.value.detail


async def test_a_parquet_file_takes_no_memory_of_the_control_plane() -> None:
    bombs = {
        "rows": (table("a" * (1 << 20), 80), "more than 67108864 bytes of text"),
        "one-row": (table("a" * (16 << 20), 1), "longer than 8388608 bytes"),
        "memory": (table("a" * (64 << 20), 64), "needs more than 2 GiB of memory"),
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data, why in bombs.values():
        assert len(data) < 1 << 20
        assert why in await refusal(data, "rollyard")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert grown < 100, f"{grown} MiB"


@pytest.mark.parametrize(
    "row",
    [
        {"data_source": SECRET},
        {"data_source": [SECRET]},
        {"data_source": "x", "prompt": SECRET},
        {"data_source": "x", "prompt": [{"role": SECRET, "content": SECRET}], SECRET: SECRET},
        {"data_source": "x", "prompt": [{"role": "user"}], "reward_model": f'["{SECRET}", "{SECRET}"]'},
        {"data_source": "x", "prompt": [{SECRET: SECRET}], "reward_model": {"ground_truth": SECRET}},
    ],
)
async def test_a_refused_row_is_not_shown(tmp_path: Path, row: object) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    reader = TaskReader(AllowList.of([tmp_path.as_uri()]), TaskFileLimits(), None)  # type: ignore[arg-type]
    source = TaskSource(url=path.as_uri(), format="verl")
    with pytest.raises(Invalid) as refused:
        await reader.read(path.as_uri(), "default", source)
    reader.close()
    assert SECRET not in "".join((refused.value.detail, *refused.value.errors))
    assert "line 1: " in refused.value.detail


@pytest.mark.parametrize(
    ("specs", "data", "problem"),
    [
        ("file:///etc/passwd", b"{}", "must be an upload"),
        ("http://127.0.0.1/", b"{}", "must be an upload"),
        (BLOB, b"[" * (9 << 20), "longer than 8388608 bytes"),
        (BLOB, b"[" * (1 << 20), "is no JSON"),
        (BLOB, b'{"repos": {"a": {"log_parser": "x", "versions": {"1": 3}}}}', "repos.a.versions.1: must be"),
    ],
)
async def test_specs_are_an_upload_of_bounded_size(specs: str, data: bytes, problem: str) -> None:
    async def upload(_namespace: str, _sha256: str) -> AsyncGenerator[bytes, None]:
        for at in range(0, len(data), 1 << 20):
            yield data[at : at + (1 << 20)]

    reader = TaskReader(AllowList.of(["file:///etc/passwd", "http://127.0.0.1/"]), TaskFileLimits(), upload)
    try:
        with pytest.raises(Invalid, match=problem):
            await reader.read(BLOB, "default", TaskSource(url=BLOB, format="swebench", specs=specs))
    finally:
        reader.close()
