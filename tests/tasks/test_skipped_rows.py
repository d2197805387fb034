"""Task lists of which the rows that are no tasks are left out: which ones, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from rollyard_crds import Task
from rollyard_crds.fields.skipped_rows import MAX_REASONS, SkippedRows
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks import file_rows
from rollyard_tasks.file_rows import line_rows
from rollyard_tasks.task_list import TaskLines, TaskListError, parse_lines


def line(name: str, **more: Any) -> str:
    return json.dumps({"id": name, "prompt": f"{name}?", **more})


def read(lines: Sequence[str], **options: Any) -> tuple[list[Task], SkippedRows]:
    """Return the tasks of a list of which bad rows are skipped, and what is said of these."""
    source = TaskSource.model_validate({"url": "x", "onBadRow": "skip", **options})
    skipped = SkippedRows()
    return parse_lines(lines, source, skipped=skipped), skipped


LONGEST = 200_000
BAD = [
    ("{", "not valid JSON: "),
    ("[]", "must be a JSON object, not list"),
    ('{"id": "b"}', "give exactly one of "),
    ('{"id": "a", "prompt": "other"}', "id: 'a' stands already on line 1"),
    ('{"id": "b", "prompt": "?", "promt": 1}', "promt: unknown field; did you mean 'prompt'?"),
    ('{"id": "b", "prompt": "\\ud800"}', "prompt: holds half of a character"),
    ('"%s"' % ("x" * LONGEST), f"longer than {LONGEST} bytes"),
    ("[" * 100_000, "not valid JSON: "),
]


@pytest.mark.parametrize(("bad", "why"), BAD, ids=[why for _, why in BAD])
def test_each_kind_of_bad_row_is_left_out_and_named(
    bad: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_rows, "MAX_ROW_BYTES", LONGEST)
    tasks, skipped = read([line("a"), "", bad, line("c")])
    assert [task.id for task in tasks] == ["a", "c"]
    assert (skipped.count, skipped.read) == (1, 3)
    assert len(skipped.reasons) == 1
    assert skipped.reasons[0].startswith("line 3: ")
    assert why in skipped.reasons[0]
    for source in (TaskSource(url="x"), TaskSource(url="x", on_bad_row="refuse")):
        with pytest.raises(TaskListError, match=r"^line 3: "):
            parse_lines([line("a"), "", bad, line("c")], source)


def test_a_row_that_a_format_cannot_read() -> None:
    good = {"data_source": "x", "prompt": [{"role": "user", "content": "?"}],
            "reward_model": {"ground_truth": "1"}}  # fmt: skip
    tasks, skipped = read([json.dumps(row) for row in (good, {**good, "prompt": 5}, good)], format="verl")
    assert [task.id for task in tasks] == ["1", "3"]
    assert skipped.reasons == ["line 2: prompt: must be a list"]


def test_the_options_count_what_is_left() -> None:
    rows = ["{" if i % 2 else line(f"t{i}") for i in range(20)]
    assert [task.id for task in read(rows, limit=3)[0]] == ["t0", "t2", "t4"]
    assert read(rows, limit=3)[1].read == 5, "what follows the last task is not read"
    shuffled = [task.id for task in read(rows, shuffle={"seed": 7}, limit=4, epochs=2)[0]]
    left = [row for row in rows if row != "{"]
    source = TaskSource.model_validate({"url": "x", "shuffle": {"seed": 7}, "limit": 4, "epochs": 2})
    assert shuffled == [task.id for task in parse_lines(left, source)]


def test_a_task_that_repeats_a_skipped_row_is_taken() -> None:
    """What repeats a row that is no task itself repeats nothing."""
    rows = [line("a"), json.dumps({"id": "a", "prompt": "b?"}), line("b"), line("b2", prompt="b?")]
    tasks, skipped = read(rows, deduplicate=True)
    assert [task.id for task in tasks] == ["a", "b"]
    assert skipped.reasons == ["line 2: id: 'a' stands already on line 1"]


def test_a_list_without_any_task_is_refused_with_the_first_reasons() -> None:
    with pytest.raises(TaskListError) as caught:
        read(["{"] * 50)
    *reasons, last = caught.value.problems
    assert [reason.split(":")[0] for reason in reasons] == [f"line {n + 1}" for n in range(MAX_REASONS)]
    assert last == "no task is left: 50 of 50 rows of the task list are skipped"
    with pytest.raises(TaskListError, match="is empty"):
        read(["", ""])


def test_faults_of_the_whole_list_are_not_skipped() -> None:
    with pytest.raises(TaskListError, match=r"^format: "):
        read([line("a")], format="missing")
    with pytest.raises(TaskListError, match="more than 1000000 tasks"):
        read([line(f"t{i}") for i in range(1001)], epochs=1000)


HOSTILE = "\x1b[2J\x1b]0;x\x07\u202e\u200b\u2028\r\n<script>alert(1)</script>"


@pytest.mark.attack(
    "a row moves the cursor of a terminal, forges a line, or is markup in the page",
    boundary="control plane",
    surface="`status.skippedRows`",
    stopped_by="every reason is one line of visible characters",
)
def test_reasons_are_single_lines_of_visible_characters() -> None:
    rows = [line("a"), line("b", **{HOSTILE: 1}), line(HOSTILE), line("c", prompt=5, **{"y" * (1 << 20): 1})]
    _, skipped = read([*rows, line("d", **{"z" * (1 << 20): 1})])
    assert skipped.count == 4
    assert all(reason.isprintable() and len(reason) <= 256 for reason in skipped.reasons)
    assert skipped.reasons[0].startswith("line 2: \\x1b[2J\\x1b]0;x\\x07\\u202e\\u200b\\u2028\\r\\n<script>")
    assert skipped.reasons[3].endswith("zzz…")


@pytest.mark.attack(
    "the reasons, which stay with the job, show what a listed source holds",
    boundary="control plane",
    surface="`status.skippedRows`",
    stopped_by="they name number and field of such a source, and nothing else",
)
def test_nothing_of_a_file_that_may_not_be_shown_is_in_the_reasons() -> None:
    secret = "hunter2"
    skipped = SkippedRows()
    source = TaskSource(url="x", on_bad_row="skip")
    reader = TaskLines(quote=False, source=source, skipped=skipped)
    rows = [
        secret, json.dumps([secret]), line(secret), line(secret), line("x", **{secret: 1}),
        line("x", prompt=[secret]), line("x", sandbox={"env": {secret: 5}}), line(f"{secret} x"),
    ]  # fmt: skip
    for row in line_rows(rows):
        reader.add(row)
    assert skipped.count == 7
    assert not any(secret in reason for reason in skipped.reasons)


@pytest.mark.attack(
    "a file of nothing but bad rows, or of huge ones, fills memory, the database or answers",
    boundary="control plane",
    surface="`tasks.onBadRow: skip`",
    stopped_by="ten reasons of 256 characters are kept, and rows that are skipped count as rows of the file",
)
@pytest.mark.parametrize("row", ["{", '{"id": "a b", "promt": 1}', '{"id": "a", "prompt": "other"}'])
def test_what_is_kept_of_bad_rows_does_not_grow(row: str) -> None:
    """Attack: a list of nothing but bad rows. Ten reasons are kept, and no further one is made."""
    skipped = SkippedRows()
    reader = TaskLines(source=TaskSource(url="x", on_bad_row="skip"), skipped=skipped)
    for one in line_rows([line("a"), *[row] * 20_000]):
        reader.add(one)
    assert (skipped.count, len(skipped.reasons)) == (20_000, MAX_REASONS)
    assert skipped.lines()[-1] == "… (19990 more)"
    assert len(reader._seen) == 1
    assert reader._problems == []
