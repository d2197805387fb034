"""math-verify's own tables, judged by the handler `math`. Where it does not agree, the reason stands here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_pipeline.handlers import StageContext
from rollyard_pipeline.handlers.base import ANSWER
from rollyard_pipeline.handlers.math import MathHandler
from rollyard_testing.pipeline.math_verify_tables import Row, TablesMissing, tables

SPEC = RolloutJobSpec.model_validate(
    {"tasks": {"stream": True}, "handler": "math", "agent": {"type": "oracle"}}
)
OTHERWISE = {
    "test_all.test_number_extraction:6": "1.22 for 1,22: a comma in a key separates numbers",
    "test_all.test_number_extraction:17": "0.111 for 0,111: the same",
    "test_all.test_complex_math_expressions:7": "0.33 for 1/3: the row asks for 2 decimals",
    "test_all.test_complex_math_expressions:13": "2.6667 for 8/3: the same",
    "test_yujianll.test_string_extraction:9": "1 - 1/e and 1 + 1/e are called equal",
}
"""The rows on which the handler does not agree. A row that it begins to agree on is taken out here."""
LEFT_OUT = {
    "test_all.test_set_rel_assymetry": "whether an inequality is compared with an interval is an option; "
    "here it always is, in both directions",
    "test_strict.test_strict_variable_comparison": "whether variables have names is an option there",
}
"""The functions whose rows depend on an option which the handler does not have."""


def _judged(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.name.partition(":")[0] not in LEFT_OUT]


async def test_the_tables_of_math_verify(missing: Callable[[str], NoReturn]) -> None:
    try:
        rows = _judged(tables())
    except TablesMissing as error:
        missing(str(error))
    assert len(rows) == 269
    handler = MathHandler()
    otherwise, wrongly_rewarded = set(), set()
    try:
        for row in rows:
            task = Task(id=row.name, prompt="?", answer=row.gold)
            context = StageContext(task, SPEC, "r", 0, 60.0, carry={ANSWER: row.answer})
            reward = (await handler.eval(context)).reward
            if reward != float(row.equal):
                otherwise.add(row.name)
            if reward > float(row.equal):
                wrongly_rewarded.add(row.name)
    finally:
        await handler.close()
    assert wrongly_rewarded == set()
    assert otherwise == set(OTHERWISE)
