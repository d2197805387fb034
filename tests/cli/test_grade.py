"""`rollyard grade`: answers without a rollout get the reward that a job would give, and people see why."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard.main import main
from rollyard_testing.checkout import ROOT
from rollyard_testing.pipeline.installed import install_handler

Run = Callable[..., tuple[int, str, str]]
ADD = {"entry_point": "add", "cases": [{"input": "1\n2", "output": "3"}]}
TASKS = [{"id": "add", "prompt": "?", "tests": ADD}, {"id": "seven", "prompt": "?", "answer": "7"}]
GOOD = {"key": "7", "answer": "7"}
RIGHT = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```"

PAGE = (ROOT / "docs/graders.md").read_text()
EXAMPLES = re.findall(r"^```\n\$ rollyard grade (.*?)^```", PAGE, re.DOTALL | re.MULTILINE)

MARKS = """
class Judge(Handler):
    needs_sandbox = False

    def check(self, task):
        if task.answer == "raises":
            raise ZeroDivisionError("in the check")
        return []

    async def eval(self, ctx):
        if ctx.task.answer == "unreadable":
            raise ValueError("the key cannot\\nbe read")
        ctx.show(f"said {ctx.final_text}")
        return Evaluation(float(ctx.final_text), {}, "Marked")
"""
"""A handler of an installed package, which gives the reward that the answer asks for."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Return a function that runs the command, and returns its status and what it printed to which file."""
    monkeypatch.chdir(tmp_path)

    def grade(*words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        status = main(["grade", *words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return grade


def lines(*rows: Any) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def test_an_answer_is_shown_with_what_was_compared(run: Run) -> None:
    status, out, err = run("--handler", "math", "--key", "7", r"So it is \boxed{8}.")
    assert (status, err) == (0, "")
    first, *marked, last = out.splitlines()
    assert first == "reward 0"
    assert "  │ expected: 7" in marked
    assert "8" in marked[0]
    assert all(line.startswith("  │ ") for line in marked), "no line of an answer looks like one of ours"
    assert last.startswith("reward components: answered 1")


@pytest.mark.parametrize(
    ("options", "answer", "reward"),
    [
        ("--choice red --choice blue --key A", "The answer is (B).", 0.0),
        ("--choice red --choice blue --key B", "The answer is (B).", 1.0),
        ("--unit K --key 450", "T = 450.5 K", 1.0),
        ("--unit K --tolerance 0 --key 450", "T = 450.5 K", 0.0),
        ("--tolerance 0 --key 450", "450", 1.0),
        ("--key=-5 --tolerance 0", "-5", 1.0),
        ("--key sulfur", "Sulfur.", 1.0),
    ],
)
def test_options_say_what_a_task_of_stem_holds(run: Run, options: str, answer: str, reward: float) -> None:
    status, out, _ = run("--handler", "stem", *options.split(), answer)
    assert (status, out.splitlines()[0]) == (0, f"reward {reward:g}")


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_page_shows_what_is_printed(run: Run, example: str) -> None:
    command, _, printed = example.partition("\n")
    assert run(*shlex.split(command))[1] == printed


def test_a_file_of_pairs(run: Run, tmp_path: Path) -> None:
    """Each pair has a line, and the status says whether all rewards are those that were expected."""
    pairs = [
        {"key": "7", "answer": "The answer is 7.", "expect": 1},
        {"key": "7", "answer": "<think>The answer is 7.</think>\nThe answer is 8.", "expect": 0.0},
        {"key": "half", "answer": "Half", "id": "h"},
    ]
    (tmp_path / "pairs.jsonl").write_text(lines(*pairs[:2]) + "\n" + lines(pairs[2]))
    status, out, err = run("--handler", "stem", "--file", "pairs.jsonl")
    assert (status, err) == (0, "")
    first, second, third, total = out.splitlines()
    assert first.startswith("line 1: reward 1: ")
    assert second.startswith("line 2: reward 0: ")
    assert third.startswith("h: reward 1: ")
    assert total == "3 answers; reward 1: 2, reward 0: 1"
    with gzip.open(tmp_path / "wrong.jsonl.gz", "wt") as file:
        file.write(lines({**pairs[0], "expect": 0.5}, pairs[1]))
    status, out, err = run("--handler", "stem", "--file", "wrong.jsonl.gz")
    assert out.startswith("line 1: reward 1, not 0.5: ")
    assert (status, err) == (1, "rollyard: not as expected: 1 of 2 rewards\n")


def test_json_has_the_names_of_the_record(run: Run) -> None:
    row = {"key": "B", "choices": ["red", "blue"], "answer": "The answer is B.", "expect": 1}
    status, out, _ = run(
        "--handler", "stem", "--file", "-", "-o", "json", stdin=lines(row, {**row, "id": "x"})
    )
    assert status == 0
    first, second = map(json.loads, out.splitlines())
    assert first.keys() == {
        "id", "expect", "status", "reason", "message", "reward", "reward_reason", "reward_components",
        "reward_output",
    }  # fmt: skip
    assert (first["id"], first["reward"], first["expect"], second["id"]) == ("line 1", 1.0, 1.0, "x")


def test_an_answer_is_read_from_standard_input(run: Run) -> None:
    """It is graded as the same text on the command line, newlines included."""
    printed = run("--handler", "stem", "--key", "7", "-", stdin="So:\n#### 7")
    assert printed == run("--handler", "stem", "--key", "7", "So:\n#### 7")
    assert (printed[0], printed[1].splitlines()[0]) == (0, "reward 1")


def test_a_byte_order_mark_is_skipped(run: Run, tmp_path: Path) -> None:
    answered = run("--handler", "stem", "--key", "7", "-", stdin="\ufeff7")
    assert answered == run("--handler", "stem", "--key", "7", "7")
    row = "\ufeff" + lines({"key": "7", "answer": "7", "expect": 1})
    (tmp_path / "pairs.jsonl").write_text(row)
    with gzip.open(tmp_path / "pairs.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(row)
    for name in ("-", "pairs.jsonl", "pairs.jsonl.gz"):
        status, _, err = run("--handler", "stem", "--file", name, stdin=row)
        assert (status, err) == (0, ""), name


def test_a_refused_line_does_not_end_the_command(run: Run, tmp_path: Path) -> None:
    """It is named and counted, the lines after it are graded, and the last line is always there."""
    rows = lines(GOOD) + '{"kye": "7", "answer": "7"}\n[1\n' + lines({"answer": "7", "id": 9}, GOOD)
    status, out, err = run("--handler", "stem", "--file", "-", stdin=rows)
    first, second, third, fourth, fifth, total = out.splitlines()
    assert first.startswith("line 1: reward 1: ")
    assert second == "line 2: not graded: kye: unknown field; did you mean 'key'?"
    assert third.startswith("line 3: not graded: not valid JSON: ")
    assert fourth == "9: not graded: key: required by the handler 'stem'"
    assert fifth.startswith("line 5: reward 1: ")
    assert total == "5 answers; reward 1: 2, not graded: 3"
    assert (status, err) == (1, "rollyard: not graded, for the reasons above: 3\n")
    status, out, _ = run("--handler", "stem", "--file", "-", "-o", "json", stdin=rows)
    refused = json.loads(out.splitlines()[1])
    assert (status, refused["id"], refused["reward"], refused["reason"]) == (
        1,
        "line 2",
        None,
        "InvalidInput",
    )


def test_a_file_that_cannot_be_read_further_has_counts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_bytes((lines(GOOD) * 1000).encode() + b"\xff\n")
    status, out, err = run("--handler", "stem", "--file", "pairs.jsonl")
    assert re.fullmatch(r"\d+ answers; reward 1: \d+", out.splitlines()[-1])
    assert (status, err.partition(" (")[0]) == (1, "rollyard: pairs.jsonl: not UTF-8 text")


def test_ctrl_c_shows_the_counts_so_far() -> None:
    command = [sys.executable, "-m", "rollyard", "grade", "--handler", "stem", "--file", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as grading:
        assert grading.stdin is not None
        assert grading.stdout is not None
        grading.stdin.write(lines(GOOD) * 8)
        grading.stdin.flush()
        shown = [grading.stdout.readline() for _ in range(8)]
        grading.send_signal(signal.SIGINT)
        rest, err = grading.communicate()
    assert shown[-1].startswith("line 8: reward 1")
    assert (grading.returncode, rest, err.strip()) == (130, "", "8 answers; reward 1: 8")


def test_the_verdict_is_first_in_a_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal may cut the rest."""
    long = {"key": "7", "answer": r"So it is \boxed{" + "8" * 100 + "}.", "expect": 1}
    _, out, _ = run("--handler", "math", "--file", "-", stdin=lines(long))
    first, total = out.splitlines()
    assert first.startswith("line 1: reward 0, not 1: different | compared answer: 888")
    assert total == "1 answer; reward 0: 1"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("--handler", "math", "--file", "-", stdin=lines({**long, "id": "i" * 100}))
    assert f"{'i' * 31}…: reward 0, not 1: different | " in out


def test_integers_of_a_file_are_texts(run: Run) -> None:
    status, out, err = run(
        "--handler", "math", "--file", "-", stdin=lines({"key": 7, "answer": "7", "id": 3})
    )
    assert (status, err, out.partition(":")[0]) == (0, "", "3")


def test_a_key_that_cannot_be_read_is_named_as_it_was_given(run: Run) -> None:
    row = {"key": r"\frac{1}{", "answer": "7"}
    problem = r"the expected answer cannot be read: \frac{1}{"
    _, out, _ = run("--handler", "math", "--file", "-", stdin=lines(row))
    assert out.splitlines()[0] == f"line 1: not graded: VerifierFailed: key: {problem}"
    _, _, err = run("--handler", "math", "--key", row["key"], row["answer"])
    assert err == f"rollyard: not graded: VerifierFailed: --key: {problem}\n"


def test_a_task_that_needs_its_sandbox_is_refused_in_words(
    run: Run, tmp_path: Path, bubblewrap_works: None
) -> None:
    (tmp_path / "tasks.jsonl").write_text(lines({"id": "files", "prompt": "?", "test_script": "true"}))
    status, out, err = run("--handler", "mixed", "--tasks", "tasks.jsonl", "7")
    problem = "the evaluation of this task judges what Run left in its sandbox"
    assert (status, out, err) == (1, "", f"rollyard: not graded: {problem}\n")
    _, out, _ = run("--handler", "mixed", "--tasks", "tasks.jsonl", "-o", "json", "7")
    assert (json.loads(out)["reason"], json.loads(out)["message"]) == ("InvalidInput", problem)


def test_a_task_has_the_name_that_its_row_has(run: Run, tmp_path: Path) -> None:
    """Formats escape characters of it; both spellings are taken. Tasks near to an unknown one are named."""
    rows = [
        {"id": f"a__b/q_{number}", "question": "Which?", "choices": ["red", "blue"], "answer": 1}
        for number in range(5)
    ]
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    words = ["--handler", "stem", "--tasks", "rows.jsonl", "--format", "mcq", "--task"]
    for name in ("a__b/q_3", "a_5f__5f_b/q_5f_3"):
        status, out, err = run(*words, name, "(B)")
        assert (status, out.splitlines()[:1]) == (0, ["reward 1"]), err
    status, _, err = run(*words, "a__b/q_9", "(B)")
    named = re.fullmatch(r"rollyard: --task: --tasks has no 'a__b/q_9'; there is (.*)\n", err)
    assert named is not None, err
    assert re.fullmatch(r"('a_5f__5f_b/q_5f_\d'(, )?){3}", named[1])


@pytest.mark.parametrize("command", ["grade", "rescore"])
def test_help_names_the_handlers_of_the_page(capsys: pytest.CaptureFixture[str], command: str) -> None:
    named = re.search(r"^- Handlers that judge an answer can be tried: (.*?), *\n", PAGE, re.MULTILINE)
    assert named is not None
    assert main([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ", ".join(re.findall(r"`([a-z]+)`", named[1])) in shown


@pytest.mark.parametrize("words", ["--handler math --key 7", "--handler math --kye 7 7", "--key 7 7"])
def test_a_wrong_command_line_has_a_status_of_its_own(run: Run, words: str) -> None:
    assert run(*words.split())[0] == 2


def test_programs_run_in_a_sandbox(run: Run, tmp_path: Path, bubblewrap_works: None) -> None:
    (tmp_path / "tasks.jsonl").write_text(lines(*TASKS))
    pairs = [
        {"task": "add", "answer": RIGHT, "expect": 1},
        {"task": "add", "answer": RIGHT.replace("+", "-"), "expect": 0},
    ]
    (tmp_path / "pairs.jsonl").write_text(lines(*pairs))
    status, out, err = run("--handler", "mixed", "--tasks", "tasks.jsonl", "--file", "pairs.jsonl")
    assert (status, err) == (0, "")
    assert out.startswith("line 1: reward 1: 1 of 1 tests passed. | ")
    assert "expected: 3" in out.splitlines()[1]


def test_a_published_file_of_mathematics_is_validated_and_graded(run: Run, tmp_path: Path) -> None:
    """Every 22nd row of GSM8K: the number is right with its commas or without, another one is not."""
    path = Path(os.environ.get("ROLLYARD_SHARED", "")) / "data/gsm8k_test.jsonl"
    if not path.is_file():
        pytest.skip("ROLLYARD_SHARED names no folder with data/gsm8k_test.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()][::22]
    (tmp_path / "gsm8k.jsonl").write_text(lines(*rows))
    assert main(["validate", "-f", "gsm8k.jsonl", "--format", "math", "--handler", "math"]) == 0
    pairs: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        gold = row["answer"].rpartition("#### ")[2]
        plain = gold.replace(",", "")
        said = {gold: 1, rf"\boxed{{{plain}}}": 1, f"The answer is {float(plain) + 1}.": 0}
        pairs += [{"task": str(number), "answer": text, "expect": right} for text, right in said.items()]
    (tmp_path / "pairs.jsonl").write_text(lines(*pairs))
    status, out, err = run(
        "--handler", "math", "--tasks", "gsm8k.jsonl", "--format", "math", "--file", "pairs.jsonl"
    )
    assert (status, err) == (0, "")
    assert f"{3 * len(rows)} answers; reward 1: {2 * len(rows)}, reward 0: {len(rows)}" in out


def test_a_published_file_of_programs_is_validated_and_graded(
    run: Run, tmp_path: Path, bubblewrap_works: None
) -> None:
    calls = {"fn_name": "even", "inputs": [[2], [3]], "outputs": [["ok"], ["no"]]}
    prints = {"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"]}
    even = "def even(n):\n    return 'no' if n % 2 else 'ok'"
    add = "print(sum(map(int, input().split())))"
    apps = [
        {
            "problem_id": number,
            "question": "?",
            "solutions": json.dumps([program]),
            "input_output": json.dumps(cases),
            "difficulty": "interview",
        }
        for number, (program, cases) in enumerate([(even, calls), (add, prints)])
    ]
    (tmp_path / "apps.jsonl").write_text(lines(*apps))
    assert main(["validate", "-f", "apps.jsonl", "--format", "apps", "--handler", "code"]) == 0
    said = [("0", even, 1), ("0", "def even(n): return 'ok'", 0), ("1", add, 1), ("1", "print(3)", 0)]
    pairs = [{"task": task, "answer": answer, "expect": expect} for task, answer, expect in said]
    (tmp_path / "pairs.jsonl").write_text(lines(*pairs))
    status, out, err = run(
        "--handler", "code", "--tasks", "apps.jsonl", "--format", "apps", "--file", "pairs.jsonl"
    )
    assert (status, err) == (0, "")
    assert "4 answers; reward 1: 2, reward 0: 2" in out


def test_rows_of_another_format_are_tasks(run: Run, tmp_path: Path) -> None:
    row = {"question": "Which?", "choices": ["red", "blue"], "answer": 1}
    (tmp_path / "rows.jsonl").write_text(lines(row))
    status, out, _ = run("--handler", "stem", "--tasks", "rows.jsonl", "--format", "mcq", "The answer is (B)")
    assert (status, out.splitlines()[0]) == (0, "reward 1")


def test_a_handler_of_an_installed_package(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of it is no reward, and no traceback either."""
    install_handler(tmp_path, MARKS, monkeypatch)
    status, out, _ = run("--handler", "steered", "0.25")
    assert (status, out) == (0, "reward 0.25 (Marked)\n  │ said 0.25\n")
    status, out, err = run("--handler", "steered", "--key", "unreadable", "1")
    assert (status, out) == (1, "")
    assert err.startswith("rollyard: not graded: ")
    assert "ValueError: the key cannot be read" in err
    assert len(err.splitlines()) == 1
    rows = lines({"key": "unreadable", "answer": "1", "expect": 1}, {"key": "x", "answer": "1", "expect": 1})
    status, out, err = run("--handler", "steered", "--file", "-", stdin=rows)
    assert [line.partition(":")[0] for line in out.splitlines()] == [
        "line 1",
        "line 2",
        "2 answers; reward 1",
    ]
    assert out.splitlines()[0].startswith("line 1: not graded: ")
    assert (status, err) == (1, "rollyard: not graded, for the reasons above: 1\n")
    status, out, err = run("--handler", "steered", "--key", "raises", "1")
    assert (status, out) == (1, "")
    assert err == ("rollyard: the handler 'steered' cannot check the key: ZeroDivisionError: in the check\n")


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (lines(GOOD) + "[1", "line 2: not graded: not valid JSON: "),
        ("7", "line 1: not graded: must be a JSON object, not int"),
        (lines({"kye": 1, **GOOD}), "line 1: not graded: kye: unknown field; did you mean 'key'?"),
        (lines({**GOOD, "key": True}), "line 1: not graded: key: must be a string"),
        (lines({"key": "7"}), "line 1: not graded: answer: is missing"),
        (lines({"answer": "7"}), "line 1: not graded: key: required by the handler 'math'"),
        (lines({**GOOD, "expect": "good"}), "line 1: not graded: expect: must be a number"),
        (lines({**GOOD, "task": "add"}), "line 1: not graded: task: needs --tasks"),
        ("\n", "there is nothing to grade"),
    ],
)
def test_refused_lines_say_where_and_what(run: Run, stdin: str, message: str) -> None:
    status, out, err = run("--handler", "math", "--file", "-", stdin=stdin)
    assert status in (1, 2)
    assert message in out + err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--handler math --file nowhere.jsonl", "nowhere.jsonl: No such file or directory"),
        ("--handler math --tasks nowhere.jsonl 7", "nowhere.jsonl: No such file or directory"),
        ("--handler math --tasks tasks.jsonl 7", "rollyard: --task: required, because --tasks has 2 tasks"),
        (
            "--handler math --tasks tasks.jsonl --task sevn 7",
            "rollyard: --task: --tasks has no 'sevn'; there is 'seven'",
        ),
        ("--handler math --tasks tasks.jsonl --task add 7", "task 'add': answer: required by the handler"),
        ("--handler math --tasks tasks.jsonl --format x 7", "no task format 'x' is installed"),
        (
            "--handler math --tasks tasks.jsonl --file -",
            "line 1: not graded: key, choices and numeric: cannot",
        ),
        ("--handler math 7", "rollyard: --key: required by the handler 'math'"),
        ("--handler math --key 7 --file pairs.jsonl", "--key, --choice, --unit and --tolerance are for"),
        ("--handler math --key 7", "give one ANSWER, in quotes, or --file"),
        ("--handler math --key 7 the answer", "give one ANSWER, in quotes, or --file"),
        ("--handler math --key 7 --task add 7", "--task is for an ANSWER with --tasks"),
        ("--handler math --key 7 --format verl 7", "--format is for --tasks"),
        ("--handler math --kye 7 7", "No such option '--kye'"),
        ("--handler stem --key 7 --unit flobs 7", "rollyard: --unit: is not known: 'flobs'"),
        ("--handler stem --key 7 --tolerance -1 7", "rollyard: --tolerance: must be at least"),
        (
            "--handler stem --key seven --unit K 7",
            "rollyard: --key: must be one number, in the unit that --unit names",
        ),
        (
            "--handler stem --choice a --choice b --unit K --key A 7",
            "rollyard: --unit and --tolerance: cannot be given beside --choice",
        ),
        ("--handler math --key 7 --choice a 7", "--choice: the handler 'math' does not use it"),
        ("--handler math --key 7 --unit K 7", "--unit: the handler 'math' does not use it"),
        ("--handler code --key 7 --tolerance 0 7", "--tolerance: the handler 'code' does not use it"),
        ("--handler shell --key 7 7", "the handler 'shell' judges what Run left in its sandbox"),
        ("--handler unscored 7", "the handler 'unscored' gives no reward, and a trainer's rewards are not"),
        ("--handler No --key 7 7", "handler: must begin with a small letter"),
        ("--handler nobodys --key 7 7", "no handler 'nobodys' is installed"),
    ],
)
def test_refusals_say_where_and_what(run: Run, tmp_path: Path, words: str, message: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(lines(*TASKS))
    status, out, err = run(*words.split(), stdin=lines(GOOD))
    assert status in (1, 2)
    assert message in out + err
    assert "Traceback" not in err
