"""Files become rows by their content alone, however their bytes are cut into pieces."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollyard_crds.fields import json_values
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks import row_texts, task_file
from rollyard_tasks.file_rows import FileRow, FileRows
from rollyard_tasks.row_texts import FileRefused
from rollyard_tasks.task_file import TaskFile
from rollyard_tasks.task_list import TaskListError

ROWS: list[Any] = [
    {"id": "a", "prompt": 'é "x"\\ [{,}]\n\u2028?', "n": 12345678901234567890123},
    {"id": "b", "prompt": "]", "metadata": {"k": [[], {}]}},
]
BOM = b"\xef\xbb\xbf"
CSV = b'id,"prompt",answer\r\na,"x ""y"",\r\nz",\r\n\r\nb,q,2'
CELLS = [{"id": "a", "prompt": 'x "y",\r\nz'}, {"id": "b", "prompt": "q", "answer": "2"}]


def read(data: bytes, step: int = 1 << 20) -> list[FileRow | str]:
    """Return the rows of a file that comes in pieces, and the problem that ends it, if there is one."""
    rows, found = FileRows(1 << 30), list[FileRow | str]()
    try:
        for at in range(0, len(data), step):
            found += (row for row in rows.feed(data[at : at + step]) if row is not None)
        found += (row for row in rows.end() if row is not None)
    except FileRefused as error:
        found.append(str(error))
    return found


def lines(end: str, **how: Any) -> bytes:
    return "".join(json.dumps(row, **how) + end for row in ROWS).encode()


@pytest.mark.parametrize(
    ("data", "unit", "expected"),
    [
        (lines("\n"), "line", ROWS),
        (lines("\r\n", ensure_ascii=False), "line", ROWS),
        (lines("\r")[:-1], "line", ROWS),
        (BOM + lines("\n"), "line", ROWS),
        (json.dumps(ROWS).encode(), "item", ROWS),
        (BOM + json.dumps(ROWS, indent=2, ensure_ascii=False).encode() + b"\n", "item", ROWS),
        (b" [ ] ", "item", []),
        (CSV, "row", CELLS),
        (BOM + CSV.replace(b"\r\n", b"\r") + b"\r", "row", [{"id": "a", "prompt": 'x "y",\rz'}, CELLS[1]]),
        (b",q,a\n0,x,y\n1,,z\n", "row", [{"q": "x", "a": "y"}, {"a": "z"}]),
        (
            gzip.compress(lines("\n")[:20], mtime=0) + gzip.compress(lines("\n")[20:], mtime=0) + bytes(9),
            "line",
            ROWS,
        ),
        (bz2.compress(CSV), "row", CELLS),
        (lzma.compress(BOM + json.dumps(ROWS).encode()), "item", ROWS),
        (b"\n\n", "line", []),
    ],
)
def test_kinds_of_files(data: bytes, unit: str, expected: list[Any]) -> None:
    for step in (1, 2, 3, 1 << 20):
        found = read(data, step)
        assert [row.document for row in found if isinstance(row, FileRow)] == expected
        assert {row.unit for row in found if isinstance(row, FileRow)} <= {unit}
        assert len(found) == len(expected)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'{"a": 1}\n\n{"a"\n\xff{}\n{}', ["{'a': 1}", "3: not valid JSON: ", "4: not UTF-8 text", "{}"]),
        (b"[{},,{}]", ["{}", "2: not valid JSON: ", "{}"]),
        (b"[{]},{}]", ["1: not valid JSON: ", "{}"]),
        (b'[1,"a,]"]', ["1", "a,]"]),
        (b"[{}] {}", ["{}", "text follows the end of the list"]),
        (b'[{}, {"a": "]', ["{}", "the list does not end"]),
        (b'{\n  "a": 1\n}', ["an object has several lines"]),
        (b'"id": "a", "prompt": "x"}\n{}', ["1: not valid JSON: ", "{}"]),
        (b"a,b\n1,2,3\n1,2\n", ["1: has 3 cells, and the header names 2 columns", "{'a': '1', 'b': '2'}"]),
        (b'a,b\n5" x,2\n1,2"\n1\n', ["1: a quote is not closed", "2: has 1 cells"]),
        (b"a,a\n1,2\n", ["the header names a column twice"]),
        (b"a,b\n1,\xff\n1,2\n", ["1: not UTF-8 text", "{'a': '1', 'b': '2'}"]),
        (
            BOM + b'{"a": 1}\n' + BOM + b"{}\n{}",
            ["{'a': 1}", "2: not valid JSON: Unexpected UTF-8 BOM", "{}"],
        ),
        ("a,b\n1,2\n".encode("utf-16"), ["is UTF-16 text"]),
        (b"\x28\xb5\x2f\xfd", ["is compressed by Zstandard"]),
        (b"PK\x03\x04", ["is a ZIP archive"]),
        (gzip.compress(b"PAR1", mtime=0), ["is a Parquet file that was compressed"]),
        (gzip.compress(b"{}\n", mtime=0)[:-5], ["{}", "the compressed file is damaged"]),
    ],
)
def test_what_is_wrong_and_what_is_read_after_it(data: bytes, found: list[str]) -> None:
    for step in (1, 2, 1 << 20):
        shown = [
            row
            if isinstance(row, str)
            else f"{row.number}: {row.problem}"
            if row.problem
            else f"{row.document}"
            for row in read(data, step)
        ]
        assert len(shown) == len(found)
        assert all(map(str.startswith, shown, found)), shown


@given(st.text('"\\[]{},\n\r a1', max_size=30).map(str.encode), st.sampled_from([b"[", b"a,b\n", b""]))
def test_pieces_make_no_difference(end: bytes, begin: bytes) -> None:
    whole = read(begin + end)
    assert [read(begin + end, step) for step in (1, 2, 5)] == [whole] * 3
    if begin == b"[":
        try:
            expected = json.loads(begin + end)
        except ValueError:
            assert any(isinstance(row, str) or row.problem for row in whole)
        else:
            assert [row.document for row in whole if isinstance(row, FileRow)] == expected


@pytest.mark.parametrize("form", ["line", "item", "row"])
def test_a_row_that_is_too_long_is_left_out_alone(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_texts, "MAX_ROW_BYTES", 1000)
    rows = [{"a": "1", "b": "2"}, {"a": 'x",\n[{' * 200, "b": "2"}, {"a": "3", "b": "4"}]
    if form == "row":
        cells = [[row["a"].replace('"', '""'), row["b"]] for row in rows]
        data = "a,b\n" + "".join(f'"{a}","{b}"\n' for a, b in cells)
    else:
        data = json.dumps(rows) if form == "item" else "".join(json.dumps(row) + "\n" for row in rows)
    for step in (1, 7, 1 << 20):
        first, long, last = read(data.encode(), step)
        assert isinstance(first, FileRow)
        assert isinstance(long, FileRow)
        assert isinstance(last, FileRow)
        assert (first.document, last.document) == (rows[0], rows[2])
        assert (long.unit, long.number) == (form, 2)
        assert long.problem.startswith("longer than ")


def test_values_of_a_row_are_counted_where_texts_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "MAX_VALUES", 50)
    text = json.dumps({"a": '[{,"' * 100})
    assert not json_values.too_many_values(text)
    assert not json_values.too_many_values(text.encode())
    for many in ("[" + "{}," * 60 + "{}]", '{"a": ' + "[" * 60, '["' + "x" * 60 + '"' + ", 1" * 60):
        assert json_values.too_many_values(many)
        assert json_values.too_many_values(many.encode())


def kept(data: bytes, **options: Any) -> list[tuple[str, Any]]:
    """Return the ids of the tasks of a file, and the tasks."""
    tasks = TaskFile(TaskSource.model_validate({"url": "x", **options}), bytes, bytes)
    for _ in tasks.feed(data):
        pass
    for _ in tasks.end():
        pass
    return list(tasks.tasks(lambda name, data: (name, json.loads(data))))


def test_tasks_are_kept_with_the_ids_of_their_epochs() -> None:
    metadata = {"id": "b", "n": 12345678901234567890123}
    data = json.dumps([{"metadata": metadata, "prompt": "?", "id": "a"}, {"id": "b", "prompt": "!"}]).encode()
    found = kept(data, epochs=2)
    assert [name for name, _ in found] == ["a", "b", "a:epoch2", "b:epoch2"]
    assert all(task["id"] == name for name, task in found)
    assert {task["metadata"]["n"] for name, task in found if name.startswith("a")} == {metadata["n"]}


@pytest.mark.parametrize("text", [b"question;answer\n1;2\n", b"a\tb\n", b"prompt\nhello\n"])
def test_what_is_nearly_a_table_says_how_one_begins(text: bytes) -> None:
    with pytest.raises(TaskListError) as refused:
        kept(text)
    hint = "a table in CSV begins with a line of two names or more, with commas between them"
    assert [hint in problem for problem in refused.value.problems] == [True] + [False] * (
        text.count(b"\n") - 1
    )


def test_a_task_that_is_too_large_is_refused_by_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_file, "MAX_TASK_BYTES", 2000)
    monkeypatch.setattr(task_file, "MAX_METADATA_BYTES", 500)
    rows = [
        {"id": "a", "prompt": "x" * 1000},
        {"id": "b", "prompt": "x" * 3000},
        {"id": "c", "prompt": "?", "metadata": {"x": "x" * 600}},
    ]
    with pytest.raises(TaskListError) as refused:
        kept(json.dumps(rows).encode())
    assert refused.value.problems == [
        "item 2: the task has 3022 bytes as JSON, and may have 2000",
        "item 3: metadata: has more than 500 bytes as JSON",
    ]
