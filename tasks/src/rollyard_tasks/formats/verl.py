"""The format `verl`: data_source, prompt, reward_model and extra_info, as verl and DAPO write them."""

from __future__ import annotations

import json
from typing import Any, Final

from rollyard_tasks.formats.answers import answer_fields
from rollyard_tasks.formats.contests import call_tests, code_tests, results
from rollyard_tasks.formats.ids import task_id
from rollyard_tasks.formats.interface import Row, RowRefused, TaskFormat

_CHOICE_ABILITIES: Final = frozenset({"mcq", "multiple_choice", "multiple-choice"})
_LETTERS: Final = "ABCDEFGHIJ"


class VerlFormat(TaskFormat):
    """Reads rows with a conversation and `reward_model.ground_truth`.

    The ground truth is the task's answer, or a list of accepted ones, which Skywork writes as a JSON text. A
    row whose `ability` is `mcq` or `multiple_choice` has a letter as its answer, and may have the texts of
    the choices in `extra_info.choices`. A ground truth with `inputs` and `outputs`, or a list of objects with
    `input` and `output` as DeepCoder writes it, holds tests.
    """

    columns = (("data_source", "prompt", "reward_model"),)

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row, whose id is `data_source/split/index` where the row has all three."""
        source = row.text("data_source")
        extra = row.row("extra_info", optional=True)
        fields: dict[str, Any] = {"messages": row.chat("prompt")}
        reward = row.row("reward_model")
        tests = _tests(reward)
        if tests is not None:
            fields["tests"] = tests
        else:
            fields |= answer_fields(reward, "ground_truth")
        if tests is None and str(row.values.get("ability", "")).lower() in _CHOICE_ABILITIES:
            if "answers" in fields:
                raise RowRefused(reward.name("ground_truth"), "must be one letter for multiple choice")
            fields["choices"] = _choices(extra, fields["answer"])
        split, index = extra.values.get("split"), extra.values.get("index")
        if split is not None and index is not None:
            fields["id"] = task_id(source, split, index)
        fields["metadata"] = {"data_source": source, "extra_info": dict(extra.values)}
        if "ability" in row.values:
            fields["metadata"]["ability"] = row.values["ability"]
        return fields


def _tests(reward: Row) -> dict[str, Any] | None:
    """Return the tests of a ground truth such as {"inputs": [...], "outputs": [...], "fn_name": ...}."""
    truth = reward.values.get("ground_truth")
    listed = _listed_tests(reward)
    if listed is not None:
        return listed
    if not isinstance(truth, dict) and not (isinstance(truth, str) and truth.lstrip().startswith("{")):
        return None
    try:
        row = reward.row("ground_truth")
    except RowRefused:
        return None  # A set such as {1, 2} is an answer.
    if "inputs" not in row.values:
        return None
    return call_tests(row)


def _listed_tests(reward: Row) -> dict[str, Any] | None:
    """Return the tests of a ground truth such as [{"input", "output", "testtype", "metadata"}, ...].

    A test of the type `functional` calls the function `metadata.func_name`, which all of them share.
    """
    truth = reward.values.get("ground_truth")
    if isinstance(truth, str):
        try:
            truth = json.loads(truth) if truth.lstrip().startswith("[") else None
        except (ValueError, RecursionError):
            return None
    if not isinstance(truth, list) or not truth or not all(isinstance(case, dict) for case in truth):
        return None
    names: set[str] = set()
    inputs, outputs = [], []
    for index, case in enumerate(truth):
        test = Row(case, reward.number, f"{reward.name('ground_truth')}[{index}]")
        inputs.append(test.text("input", ""))
        outputs.append(test.text("output", ""))
        metadata = test.row("metadata", optional=True)
        functional = test.text("testtype", "stdin") == "functional"
        names.add(metadata.text("func_name") if functional else "")
    if len(names) > 1:
        raise RowRefused(reward.name("ground_truth"), "must call the same function in all tests")
    (name,) = names
    if not name:
        return code_tests(zip(inputs, outputs, strict=True))
    return code_tests(zip(inputs, results(outputs, plain=False), strict=True), entry_point=name)


def _choices(extra: Row, answer: str) -> list[str]:
    """Return the choices of a multiple-choice row: their texts, or letters where the row has none."""
    if "choices" in extra.values:
        return extra.items("choices")
    if len(answer) != 1 or answer.upper() not in _LETTERS:
        raise RowRefused("reward_model.ground_truth", "must be a letter from A to J for multiple choice")
    return list(_LETTERS)
