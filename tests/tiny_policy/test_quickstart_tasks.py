"""The shipped quickstart tasks are sound, and the shipped tokenizer and template keep token prefixes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from rollyard_testing.pace import patience
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "examples" / "quickstart" / "tasks.jsonl"
ONNX = ROOT / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"
HUGGING_FACE = ROOT / "examples" / "tiny-policy" / "hf"

Record = dict[str, Any]


def _records() -> list[Record]:
    return [json.loads(line) for line in TASKS.read_text().splitlines()]


def _materialize(record: Record, folder: Path) -> None:
    for path, text in record["sandbox"]["files"].items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def _bash(folder: Path, script: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=patience(30),
        check=False,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C", "ROLLYARD_ANSWER": answer},
    )


def _render_result(done: subprocess.CompletedProcess[str]) -> str:
    output = (done.stdout + done.stderr).rstrip("\n")
    if done.returncode == 0:
        return output or "(no output)"
    return "\n".join(filter(None, (output, f"[exit code {done.returncode}]")))


def _replay(record: Record, folder: Path) -> tuple[str, list[Record]]:
    """Run the reference solution; return the submitted answer and an agent's conversation."""
    messages: list[Record] = [{"role": "user", "content": record["prompt"]}]
    for call in record["solution"]:
        function = {"name": call["name"], "arguments": call["arguments"]}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        arguments = call["arguments"]
        if call["name"] == "submit":
            return arguments["answer"], messages
        if call["name"] == "bash":
            result = _render_result(_bash(folder, arguments["command"]))
        else:
            assert call["name"] == "edit"
            assert arguments["command"] == "str_replace"
            target = folder / arguments["path"]
            before = target.read_text()
            assert before.count(arguments["old_str"]) == 1
            target.write_text(before.replace(arguments["old_str"], arguments["new_str"]))
            result = f"edited {arguments['path']}"
        messages.append({"role": "tool", "content": result})
    raise AssertionError(f"{record['id']}: the solution never submits")


def test_there_are_enough_tasks_and_each_is_small_and_complete() -> None:
    records = _records()
    assert len(records) >= 64
    assert len({r["id"] for r in records}) == len(records)
    assert {r["metadata"]["family"] for r in records} == {"count", "find", "filter", "rename", "fix"}
    for record in records:
        assert set(record) == {"id", "prompt", "sandbox", "test_script", "solution", "metadata"}
        assert len(json.dumps(record)) <= 2048, record["id"]
        assert len(record["solution"]) >= 2, record["id"]
        assert [c["name"] for c in record["solution"]].count("submit") == 1
        assert record["solution"][-1]["name"] == "submit"


def test_no_task_can_be_solved_by_a_prompt_reader() -> None:
    """What the last working call needs is not in the prompt, so the policy has to read an output for it."""
    for record in _records():
        *_, last, submit = record["solution"]
        decisive = submit["arguments"]["answer"]
        if decisive == "done":
            decisive = " ".join(v for k, v in last["arguments"].items() if k != "new_str")
        for separator in "/=.":
            decisive = decisive.replace(separator, " ")
        prompt = record["prompt"]
        assert any(word not in prompt for word in decisive.split() if word.isalnum()), record["id"]


def test_shipped_tasks_are_what_the_generator_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed gives the same tasks, and no file of a training task is a file of theirs."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "tiny-policy"))
    tasks = importlib.import_module("tinypolicy.tasks")
    templates = importlib.import_module("tinypolicy.templates").TEMPLATES
    drawn = tasks.generate(templates, 1, len(_records()), "held-out")
    assert tasks.json_lines(drawn) == TASKS.read_text()
    held_out = {text for record in _records() for text in record["sandbox"]["files"].values() if text}
    trained = {
        text
        for task in tasks.generate(templates, 0, 700, "train")
        for text in task.draft.files.values()
        if text
    }
    assert held_out
    assert trained
    assert not held_out & trained
    assert all(tasks.side_of(text) == "held-out" for text in held_out)
    assert all(tasks.side_of(text) == "train" for text in trained)


@pytest.mark.parametrize("record", _records(), ids=lambda r: str(r["id"]))
def test_reference_solution_is_needed_and_suffices(record: Record, tmp_path: Path) -> None:
    untouched, solved = tmp_path / "untouched", tmp_path / "solved"
    for folder in (untouched, solved):
        folder.mkdir()
        _materialize(record, folder)
    assert _bash(untouched, record["test_script"]).returncode != 0
    assert _bash(untouched, record["test_script"], "done").returncode != 0
    answer, _ = _replay(record, solved)
    done = _bash(solved, record["test_script"], answer)
    assert done.returncode == 0, (done.stdout, done.stderr)


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _template(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


@pytest.mark.parametrize("folder", [ONNX, HUGGING_FACE], ids=["onnx", "hugging-face"])
def test_each_turn_extends_the_token_ids_of_the_turns_before(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = _template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])
    for number, record in enumerate(_records()):
        work = tmp_path / str(number)
        work.mkdir()
        _materialize(record, work)
        _, messages = _replay(record, work)
        previous: list[int] = []
        for turns in range(1, len(messages) + 1):
            asks = messages[turns - 1]["role"] != "assistant"
            text = template.render(messages=messages[:turns], add_generation_prompt=asks)
            ids = tokenizer.encode(text).ids
            assert ids[: len(previous)] == previous
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            previous = ids


def test_template_renders_tool_calls_and_results_in_hermes_format() -> None:
    template = _template((ONNX / "chat_template.jinja").read_text())
    call = {"name": "bash", "arguments": {"command": "grep 'é' a<b"}}
    text = template.render(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "Well.", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": "two"},
        ],
        tools=[{"type": "function", "function": {"name": "bash"}}],
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nLook.<|im_end|>\n"
        "<|im_start|>assistant\nWell.\n<tool_call>\n"
        '{"name": "bash", "arguments": {"command": "grep \'é\' a<b"}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
