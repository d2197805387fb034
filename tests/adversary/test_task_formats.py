"""What the author of a job tries with the rows of a task file in another format."""

from __future__ import annotations

import io
import json
import resource
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from rollyard_api.core.problems import Invalid
from rollyard_api.jobs.allow_lists import AllowList
from rollyard_api.jobs.task_reader import TaskFileLimits, TaskReader
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks.task_list import TaskListError, parse_lines
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="control plane", surface="task files")


SECRET = "hunter2-is-the-secret"
BLOB = f"blob:sha256:{'0' * 64}"


def table(text: str, rows: int) -> bytes:
    """Return a small Parquet file of tasks whose prompts are the same text."""
    prompts = arrow.DictionaryArray.from_arrays(arrow.array([0] * rows, arrow.int32()), arrow.array([text]))
    ids = [f"t{i}" for i in range(rows)]
    file = io.BytesIO()
    parquet.write_table(arrow.table({"id": ids, "prompt": prompts}), file, compression="zstd")
    return file.getvalue()


def one_list(text: str, items: int) -> bytes:
    """Return a small Parquet file of one row, which has a list of the same text."""
    texts = arrow.DictionaryArray.from_arrays(arrow.array([0] * items, arrow.int32()), arrow.array([text]))
    file = io.BytesIO()
    parquet.write_table(
        arrow.table({"id": arrow.ListArray.from_arrays([0, items], texts)}), file, compression="zstd"
    )
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


@pytest.mark.attack(
    "a Parquet file whose reader needs gigabytes, or whose few bytes are gigabytes of rows",
    stopped_by="it is read by a process of its own with a limit of memory, and its rows have the bounds "
    "of lines",
)
async def test_a_parquet_file_takes_no_memory_of_the_control_plane() -> None:
    bombs = {
        "rows": (table("a" * (1 << 20), 80), "more than 67108864 bytes of text"),
        "one-row": (table("a" * (16 << 20), 1), "prompt: must have at most 1048576 characters"),
        "memory": (one_list("a" * (48 << 20), 64), "needs more than 2 GiB of memory"),
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data, why in bombs.values():
        assert len(data) < 1 << 20
        assert why in await refusal(data, "rollyard")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert grown < 300, f"{grown} MiB"


@pytest.mark.attack(
    "the message about a row of a listed source shows what it holds",
    stopped_by="messages of formats name number and field, and a format's own exception by its class",
)
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
    await is_not_shown(tmp_path, row, "verl")


@pytest.mark.attack(
    "the message about a row of questions shows what it holds",
    stopped_by="messages name the format, the number and the field",
)
@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("math", {"question": SECRET, SECRET: SECRET}),
        ("math", {"question": SECRET, "answer": {SECRET: SECRET}}),
        ("math", {"question": SECRET, "answer": [SECRET, [SECRET]]}),
        ("math", {"problem": SECRET, "solution": SECRET}),
        ("math", {"problem": SECRET, "answer": "1", "choices": [SECRET]}),
        ("apps", {"question": SECRET, "input_output": SECRET}),
        ("apps", {"question": SECRET, "input_output": {"inputs": [SECRET], "outputs": [], SECRET: 1}}),
        ("mcq", {"question": SECRET, "choices": {"text": [SECRET] * 2, "label": [SECRET] * 2}}),
        (
            "mcq",
            {"question": SECRET, "choices": {"text": [SECRET, ""], "label": [1, 2]}, "answerKey": SECRET},
        ),
        ("rollyard", {"question": SECRET, "answer": SECRET, SECRET: SECRET}),
        ("rollyard", {"id": "a", "prompt": SECRET, "answer": [SECRET]}),
        ("rollyard", {"id": "a", "prompt": SECRET, "answers": [SECRET, " "]}),
    ],
)
async def test_a_refused_row_of_questions_is_not_shown(tmp_path: Path, name: str, row: object) -> None:
    """A message may name the format that reads such rows, but nothing that stands in this one."""
    await is_not_shown(tmp_path, row, name)


async def is_not_shown(tmp_path: Path, row: object, name: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    reader = TaskReader(AllowList.of([tmp_path.as_uri()]), TaskFileLimits(), None)  # type: ignore[arg-type]
    source = TaskSource(url=path.as_uri(), format=name)
    with pytest.raises(Invalid) as refused:
        await reader.read(path.as_uri(), "default", source)
    reader.close()
    assert SECRET not in "".join((refused.value.detail, *refused.value.errors))
    assert "line 1: " in refused.value.detail


@pytest.mark.attack(
    "a file of the control plane, a server inside, or a file that uses up memory is named",
    surface="`tasks.specs`",
    stopped_by="only an upload of the job's namespace, of at most 8 MiB",
)
@pytest.mark.parametrize(
    ("specs", "data", "problem"),
    [
        ("file:///etc/passwd", b"{}", "must be an upload"),
        ("http://127.0.0.1/", b"{}", "must be an upload"),
        (BLOB, b"[" * (9 << 20), "longer than 8388608 bytes"),
        (BLOB, b"[" * (1 << 20), "is not JSON"),
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


DEEP = "[" * 100_000
MANY = ["1"] * 200_000


@pytest.mark.attack(
    "a row of a known format holds the control plane up",
    stopped_by="rows are checked in linear time, and refused by line and field",
)
@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("math", {"question": "?", "answer": [*MANY, *range(65)]}, "answer: must be 1 to"),
        ("math", {"question": "?", "answer": "#" * (4 << 20)}, "answer: has nothing after ####"),
        (
            "math",
            {"question": "?", "answer": "#### " + "7" * (4 << 20)},
            "answer: must have at most 65536",
        ),
        ("math", {"question": "?", "answer": DEEP}, "answer: must have at most 65536"),
        ("apps", {"question": "?", "input_output": DEEP}, "input_output: is a text that is not JSON"),
        (
            "apps",
            {"question": "?", "input_output": {"inputs": MANY, "outputs": MANY}},
            "input_output.inputs: must be at most 1024",
        ),
        (
            "apps",
            {"question": "?", "input_output": {"inputs": MANY, "outputs": "1"}},
            "input_output.outputs: must be a list",
        ),
        (
            "apps",
            {"question": "?", "solutions": DEEP, "input_output": {"inputs": ["1"], "outputs": ["1"]}},
            "solutions: is a text that is not JSON",
        ),
        ("mcq", {"question": "?", "choices": DEEP, "answerKey": "A"}, "choices: is a text that is not JSON"),
        (
            "mcq",
            {"question": "?", "choices": {"text": MANY, "label": MANY}, "answerKey": "1"},
            "choices.label: must",
        ),
        (
            "mcq",
            {"question": "?", "choices": {"text": MANY, "label": list(range(200_000))}, "answerKey": 1},
            "choices: must be 2 to 26 texts",
        ),
    ],
)
def test_hostile_rows_are_refused_by_field_in_little_time(name: str, row: object, problem: str) -> None:
    """The control plane reads them, so none of them may hold it up."""
    line = json.dumps(row)
    began = time.monotonic()
    with pytest.raises(TaskListError, match=f"^line 1: {problem}"):
        parse_lines([line], TaskSource(url="x", format=name))
    assert time.monotonic() - began < patience(5.0)


@pytest.mark.attack(
    "two rows with one id become one task",
    stopped_by="the second one is refused, whatever the type of its id",
)
@pytest.mark.parametrize("ids", [("7", 7), (7, 7.0), ("a b", "a b"), ("x" * 200, "x" * 200)])
def test_rows_with_the_same_id_are_never_one_task(ids: tuple[object, object]) -> None:
    rows = [json.dumps({"id": each, "question": f"{n}?", "answer": "1"}) for n, each in enumerate(ids)]
    with pytest.raises(TaskListError, match=r"^line 2: id: '.*' stands already on line 1"):
        parse_lines(rows, TaskSource(url="x", format="math"))


@pytest.mark.attack(
    "ids that differ become the same when they are made into names",
    stopped_by="the names of different ids differ",
)
def test_different_ids_never_become_the_same() -> None:
    names = ["a b", "a_20_b", "a_b", "a/b", "x" * 200, "x" * 201, "-7", -7.5, "sha256:0"]
    rows = [json.dumps({"id": str(name), "question": "?", "answer": "1"}) for name in names]
    assert len({task.id for task in parse_lines(rows, TaskSource(url="x", format="math"))}) == len(names)
