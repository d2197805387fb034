"""`limit`, `shuffle`, `epochs` and `deduplicate` of a task list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks.task_list import TaskListError, parse_lines
from rollyard_tasks.task_selection import TaskSelection


def lines(count: int) -> Iterator[str]:
    for i in range(count):
        yield json.dumps({"id": f"t{i}", "prompt": f"{i}?", "metadata": {"row": i}})


def ids(count: int, **options: Any) -> list[str]:
    return [task.id for task in parse_lines(lines(count), TaskSource.model_validate({"url": "x", **options}))]


def test_a_limit_stops_the_reading() -> None:
    def endless() -> Iterator[str]:
        yield from lines(3)
        pytest.fail("the line after the limit was read")

    source = TaskSource(url="x", limit=3)
    assert [task.id for task in parse_lines(endless(), source)] == ["t0", "t1", "t2"]


def test_an_order_depends_on_the_seed_alone() -> None:
    seven = ids(50, shuffle={"seed": 7})
    assert seven == ids(50, shuffle={"seed": 7})
    assert sorted(seven) == sorted(ids(50))
    assert seven not in (ids(50), ids(50, shuffle={"seed": 8}))
    assert seven[:4] == ["t23", "t45", "t15", "t12"], "a later version must not find another order"


@pytest.mark.parametrize("limit", [1, 7, 49, 50, 80])
def test_a_limit_takes_the_beginning_of_the_order(limit: int) -> None:
    assert ids(50, shuffle={"seed": 7}, limit=limit) == ids(50, shuffle={"seed": 7})[:limit]


def test_a_limit_bounds_what_is_kept() -> None:
    selection: TaskSelection[int] = TaskSelection(
        TaskSource.model_validate({"url": "x", "limit": 5, "shuffle": {}})
    )
    for i in range(1000):
        selection.add(f"t{i}", i)
        assert len(selection._kept) < 10
    assert len(list(selection.chosen())) == len(selection) == 5


def test_epochs_have_ids_and_orders_of_their_own() -> None:
    found = ids(20, epochs=3, limit=10, shuffle={"seed": 1})
    first, second = found[:10], [name.removesuffix(":epoch2") for name in found[10:20]]
    assert len(set(found)) == 30
    assert sorted(first) == sorted(second)
    assert first != second
    assert all(name.endswith(":epoch3") for name in found[20:])


def test_repeated_tasks_are_left_out() -> None:
    rows = [*lines(3), *(json.dumps({"prompt": f"{i}?", "id": f"again{i}"}) for i in range(4))]
    source = TaskSource(url="x", deduplicate=True)
    assert [task.id for task in parse_lines(rows, source)] == ["t0", "t1", "t2", "again3"]


def test_rows_that_repeat_their_id_as_well() -> None:
    assert len(parse_lines([*lines(3), *lines(3)], TaskSource(url="x", deduplicate=True))) == 3
    with pytest.raises(TaskListError, match="line 4: id: 't0' stands already on line 1"):
        parse_lines([*lines(3), *lines(3)], TaskSource(url="x"))


@pytest.mark.parametrize(("name", "problem"), [("a:epoch2", "must not end in"), ("a" * 124, "too long")])
def test_ids_that_have_no_room_for_an_epoch(name: str, problem: str) -> None:
    line = json.dumps({"id": name, "prompt": "?"})
    assert len(parse_lines([line], TaskSource(url="x"))) == 1
    with pytest.raises(TaskListError, match=f"^line 1: id: .*{problem}"):
        parse_lines([line], TaskSource(url="x", epochs=2))


@pytest.mark.parametrize(
    "source",
    [{"stream": True, "limit": 3}, {"stream": True, "format": "verl"},
     {"inline": [{"id": "a", "prompt": "?"}], "format": "verl"}, {"url": "x", "limit": 0},
     {"url": "x", "epochs": 0}, {"url": "x", "shuffle": {"seed": -1}}, {"url": "x", "format": "../verl"}],
)  # fmt: skip
def test_sources_that_are_refused(source: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TaskSource.model_validate(source)


def test_a_spec_without_options_is_written_as_before() -> None:
    """The digest of a spec decides whether a job is submitted a second time."""
    assert TaskSource(url="x").to_json() == {"url": "x", "stream": False}
