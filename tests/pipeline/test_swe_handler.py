"""The handler `swe`: repositories, diffs, hidden tests, logs, reports, and what they score."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.fields.swe_tests import SweTests
from rollyard_crds.lease import StageResult
from rollyard_crds.task import Task
from rollyard_pipeline.errors import SetupFailed, TaskInvalid
from rollyard_pipeline.handlers.swe.handler import ReportFiles, SweHandler, protection, read_report
from rollyard_pipeline.handlers.swe.log_parsers import exit_code, parse
from rollyard_pipeline.handlers.swe.report_plugin import sign
from rollyard_pipeline.handlers.swe.report_start import program_of
from rollyard_pipeline.handlers.swe.results import Results, score
from rollyard_sandbox.client.results import FileContent
from rollyard_sandbox.errors import FileError
from rollyard_testing.pipeline.swelab import (
    FAILS,
    FIX_DIFF,
    FIXING,
    HIDDEN,
    PASSES,
    SweLab,
    packed,
    swe_lab,
    swe_task,
)

TESTS_PATCH = (
    "diff --git a/tests/test_interval.py b/tests/test_interval.py\n--- a/tests/test_interval.py\n"
    + (
        f"+++ b/tests/test_interval.py\n@@ -0,0 +1,{len(HIDDEN.splitlines())} @@\n"
        + "".join(f"+{line}\n" for line in HIDDEN.splitlines())
    )
)


@pytest.fixture(params=["process", "bubblewrap"])
async def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SweLab]:
    if request.param == "bubblewrap":
        request.getfixturevalue("bubblewrap_works")
    async with swe_lab(request.param, tmp_path_factory.mktemp("s")) as found:
        yield found


def outcome(result: StageResult) -> tuple[float | None, str]:
    return result.reward, result.reward_reason


async def test_solved_and_not_solved(lab: SweLab) -> None:
    solved = await lab.rollout(swe_task([FIXING]))
    assert outcome(solved) == (1.0, "")
    assert solved.reward_components == {"fail_to_pass": 1.0, "pass_to_pass": 1.0}
    untouched = await lab.rollout(swe_task(["true"]))
    assert outcome(untouched) == (0.0, "")
    assert "4 passed" in solved.reward_output
    assert "FAILED tests/" in untouched.reward_output
    logged = await lab.rollout(swe_task([FIXING], verdict="log"))
    assert outcome(logged) == (1.0, "")
    assert logged.reward_output.endswith("(verdict: log). The policy's code can print the same.")
    assert untouched.reward_components == {"fail_to_pass": 0.0, "pass_to_pass": 1.0}


CASES = """
import pytest

@pytest.mark.parametrize("number", [3, 4], ids=["the end", "the - beyond"])
def test_outside(number):
    assert number not in Interval(1, 3)
"""


@pytest.mark.parametrize("verdict", ["report", "log"])
async def test_names_with_spaces_match_in_full_and_cut(lab: SweLab, verdict: str) -> None:
    name = "tests/test_interval.py::test_outside"
    fields: dict[str, Any] = {
        "files": {"tests/test_interval.py": HIDDEN + CASES},
        "fail_to_pass": [f"{name}[the end]", f"{name}[the"],
        "pass_to_pass": [f"{name}[the - beyond]"],
        "verdict": verdict,
    }
    assert outcome(await lab.rollout(swe_task([FIXING], **fields))) == (1.0, "")
    missing = {**fields, "pass_to_pass": [f"{name}[the other]"]}
    result = await lab.rollout(swe_task(["true"], **missing))
    assert outcome(result) == (0.0, "")
    assert result.reward_components == {"fail_to_pass": 0.0, "pass_to_pass": 0.0}
    assert result.reward_output.endswith(
        f"\nfail_to_pass: 2 of 2 did not pass: failed: {name}[the end]\n"
        f"pass_to_pass: 1 of 1 did not pass: missing: {name}[the other]"
    )


async def test_hidden_tests_come_as_a_diff_or_in_the_script(lab: SweLab) -> None:
    fields: dict[str, Any] = {"files": {}, "patch": TESTS_PATCH}
    assert outcome(await lab.rollout(swe_task([FIXING], **fields))) == (1.0, "")
    # A file in the place of the tests' folder changes nothing.
    spoiled = "rm -r repo/tests; touch repo/tests"
    assert (await lab.rollout(swe_task([FIXING, spoiled], **fields))).reward == 1.0
    with pytest.raises(SetupFailed, match=r"swe\.patch does not apply to the repository"):
        await lab.rollout(swe_task([FIXING], patch=FIX_DIFF.replace("number", "other"), files={}))


LOGGED = {
    "verdict": "log",
    "script": "echo '>>>>> Start Test Output'\nif grep -q 'number <=' interval/__init__.py; then\n"
    "echo 'FAILED a::b - no'; exit 1; fi\necho 'PASSED a::b'; [ ! -f binary ] || echo 'PASSED a::c'\n",
    "fail_to_pass": ["a::b"],
    "pass_to_pass": ["a::c"],
}


async def test_new_files_binary_ones_and_commits_are_carried(lab: SweLab) -> None:
    new = "cd repo && printf '\\000\\377' > binary && mkdir -p deep/er && touch deep/er/x"
    assert outcome(await lab.rollout(swe_task([FIXING, new], **LOGGED))) == (1.0, "")
    assert outcome(await lab.rollout(swe_task([FIXING], **LOGGED))) == (0.0, "")
    large = "head -c 200000 /dev/zero > repo/binary"
    result = await lab.rollout(swe_task([FIXING, large], **LOGGED, max_bytes=100_000))
    assert outcome(result) == (0.0, "SandboxSabotaged")


async def test_where_the_repository_comes_from(lab: SweLab) -> None:
    plain = {**LOGGED, "script": "[ -e extra/secret ] && echo 'PASSED a::b'", "pass_to_pass": []}
    archive = packed({"interval/__init__.py": b"", "extra/secret": b"", "extra/other": b""})
    # Run does not see the hidden file, and what the policy makes in its place is not carried.
    repository = {"path": "r", "archive": archive, "hidden": ["extra/secret"]}
    seen = swe_task(["[ ! -e r/extra/secret ] && cp r/extra/other r/new"], **plain, repository=repository)
    seen.swe.script = "[ -e new ] && " + seen.swe.script
    assert outcome(await lab.rollout(seen)) == (1.0, "")
    with pytest.raises(SetupFailed, match=r"swe.repository.path: the command ended with 1"):
        await lab.rollout(swe_task([], **plain, repository={"path": "nowhere"}))
    with pytest.raises(TaskInvalid, match=r"swe.repository.archive: is not in base64"):
        await lab.rollout(swe_task([], **plain, repository={"path": "r", "archive": "@"}))


def _small(folder: Path) -> str:
    """Return the name of a folder with few files, which every user may read."""
    return next(
        path.name for path in sorted(folder.iterdir()) if path.is_dir() and 0 < len(list(path.iterdir())) < 9
    )


async def test_a_folder_of_the_image_is_copied(lab: SweLab) -> None:
    copied = next(path for path in map(Path, ("/usr/share/perl5", "/usr/share/doc", "/etc")) if path.is_dir())
    script = "[ -n \"$(ls copied)\" ] && [ -e new ] && echo 'PASSED a::b'"
    plain = {**LOGGED, "script": script, "pass_to_pass": []}
    repository = {"path": "r", "source": f"{copied}/{_small(copied)}", "unpack": "r/copied"}
    task = swe_task(["touch r/new"], **plain, repository=repository)
    assert outcome(await lab.rollout(task)) == (1.0, "")


async def test_an_answer_that_is_a_diff(lab: SweLab) -> None:
    def answered(text: str) -> Task:
        task = swe_task([], submission="answer")
        call = {"name": "submit", "arguments": {"answer": text}}
        return Task.model_validate({**task.model_dump(exclude_none=True), "solution": [call]})

    assert outcome(await lab.rollout(answered(f"So:\n```diff\n{FIX_DIFF}```"))) == (1.0, "")
    for text in ("", "no diff", FIX_DIFF.replace("number", "other"), FIX_DIFF + FIX_DIFF):
        assert outcome(await lab.rollout(answered(text))) == (0.0, "PatchDoesNotApply")
    new = "diff --git a/{0} b/{0}\nnew file mode {1}\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+{2}\n"
    link = new.format("interval/link", 120000, "/etc")
    assert outcome(await lab.rollout(answered(FIX_DIFF + link))) == (0.0, "PatchDoesNotApply")
    conftest = new.format("tests/conftest.py", 100644, "import os; os._exit(0)")
    # A diff need not have git's own header to be applied, or to be left out.
    bare = conftest[conftest.index("---") :]
    for text in (conftest, bare):
        assert outcome(await lab.rollout(answered(FIX_DIFF + text))) == (1.0, "")


async def test_jobs_that_cannot_be_judged(lab: SweLab) -> None:
    for stage in ({"sandbox": "shared"}, {"carry": {"files": ["repo"]}}):
        with pytest.raises(TaskInvalid, match=r"stages\.eval: the handler 'swe' needs a fresh sandbox"):
            await lab.rollout(swe_task([FIXING]), **stage)


async def test_a_repository_without_its_test_command(lab: SweLab) -> None:
    for verdict in ("report", "log"):
        result = await lab.rollout(swe_task([FIXING], script="no-such-command\n", verdict=verdict))
        assert outcome(result) == (0.0, "NoTestResults")
        assert ("and none of the results is a failure" in result.reward_output) is (verdict == "log")
        assert (f"did not pass: missing: {PASSES[0]}" in result.reward_output) is (verdict == "log")


def test_a_task_without_a_repository() -> None:
    assert SweHandler().check(Task(id="a", prompt="?")) == ["swe: required by the handler 'swe'"]


@pytest.mark.parametrize(("path", "folder"), [("repo", "/work/repo"), ("/testbed", "/testbed")])
def test_the_repository_is_where_git_is_looked_after(path: str, folder: str) -> None:
    swe = SweTests.model_validate({"script": "pytest", "repository": {"path": path}, "fail_to_pass": ["a"]})
    assert SweHandler().folder(Task(id="a", prompt="?", swe=swe), "/work") == folder


def wanted(**fields: Any) -> SweTests:
    return SweTests.model_validate({"script": "x", **fields})


def test_what_counts_as_solved() -> None:
    tests = wanted(fail_to_pass=["a"], pass_to_pass=["b"], verdict="log")
    for results, solved in (
        ({"a": "PASSED", "b": "PASSED"}, True), ({"a": "XFAIL", "b": "SKIPPED"}, True),
        ({"a": "SKIPPED", "b": "PASSED"}, False), ({"a": "PASSED"}, False), ({}, False),
        ({"a": "PASSED", "b": "ERROR"}, False), ({"a": "XPASS", "b": "PASSED"}, False),
    ):  # fmt: skip
        assert score(tests, results).solved is solved
    assert score(wanted(fail_to_pass=["a"], absent_passes=True, verdict="log"), {"b": "FAILED"}).solved
    assert not score(wanted(fail_to_pass=["a"], absent_passes=True, verdict="log"), {"a": "SKIPPED"}).solved
    assert not score(wanted(fail_to_pass=["a"], absent_passes=True), {"b": "PASSED"}).solved
    equal = wanted(expected={"a": "PASSED", "b - why": "FAILED", "c": "SKIPPED"})
    assert score(equal, {"a": "PASSED", "b": "FAILED"}).solved
    assert not score(equal, {"a": "PASSED", "b": "PASSED"}).solved
    assert not score(equal, {"a": "PASSED", "b": "FAILED", "d": "PASSED"}).solved
    assert score(equal, {"a": "PASSED", "b": "FAILED", "d": "SKIPPED", " - why": "PASSED"}).solved
    assert not score(wanted(expected={"a": "SKIPPED"}), {"a": "SKIPPED"}).solved, "no test has decided"


P, F, S, E = "PASSED", "FAILED", "SKIPPED", "ERROR"
NAMES: list[tuple[str, str, dict[str, str], bool]] = [
    # Names with spaces stand for themselves.
    ("pytest", "t.py::a[b c]", {"t.py::a[b c]": P}, True),
    ("pytest", "t.py::a[b c]", {"t.py::a[b c]": F}, False),
    ("pytest", " t.py::a[b c] ", {"t.py::a[b c]": P}, True),
    ("pytest", "t.py::a[b - c]", {"t.py::a[b - c]": P, "t.py::a[b - d]": F}, True),
    ("pytest", "t.py::a[b::c d]", {"t.py::a[b::c d]": P}, True),
    ("pytest", "t.py::a[\u2713 x]", {"t.py::a[\u2713 x]": P}, True),
    ("pytest", "t.py::a[b\\n c]", {"t.py::a[b\\n c]": P}, True),
    ("pytest", "my tests/t.py::a", {"my tests/t.py::a": P}, True),
    # A name that was cut at a space stands for all tests with it.
    ("pytest", "t.py::a[b", {"t.py::a[b c]": P, "t.py::a[b d]": P, "t.py::a[x y]": F}, True),
    ("pytest", "t.py::a[b", {"t.py::a[b c]": P, "t.py::a[b d]": F}, False),
    ("pytest", "t.py::a[b", {"t.py::a[b c]": P, "t.py::a[b d]": S}, False),
    ("pytest", "t.py::a[b", {"t.py::a[b c]": P, "t.py::a[b d]": "XFAIL"}, True),
    ("pytest", "t.py::a[b", {"t.py::a[bc d]": P, "t.py::a[b]": P, "t.py::a[b-c]": P}, False),
    ("pytest", "t.py::a[b", {}, False),
    ("pytest", "t.py::a[[x]", {"t.py::a[[x] y]": P, "t.py::a[[x] z]": F}, False),
    ("pytest_options", "t.py::a[/x/y", {"t.py::a[/x/y z]": P}, True),
    ("matplotlib", "t.py::a[1", {"t.py::a[1 x]": P}, True),
    ("pytest", "my", {"my tests/t.py::a": P, "my tests/t.py::b": F}, False),
    # The exact name has priority.
    ("pytest", "t.py::a[b]", {"t.py::a[b]": P, "t.py::a[b] c]": F}, True),
    ("pytest", "t.py::a[b]", {"t.py::a[b]": F, "t.py::a[b] c]": P}, False),
    # Names of other frameworks are sentences, of which one may begin as another one does.
    ("jest", "adds", {"adds two numbers": P}, False),
    ("jest", "adds two numbers", {"adds two numbers": P}, True),
    ("jest", "adds (3 ms)", {"adds": P}, True),
    ("jest", "waits 5 s", {"waits": P}, True),
    ("jest", "adds [1.34 ms]", {"adds": P}, True),
    ("jest", "adds in 3.4 sec", {"adds": P}, True),
    ("tap", "adds # time=0.4ms", {"adds": P}, True),
    ("django", "test_a (m.C)", {"test_a (m.C)": P}, True),
    ("django", "test_a", {"test_a (m.C)": P}, False),
    ("django", "What it does.", {"What it does.": P}, True),
    ("go", "TestA/x_y", {"TestA/x_y": P}, True),
    ("cargo", "src/lib.rs - f (line 3)", {"src/lib.rs - f (line 3)": P}, True),
]
"""A parser, the name in a data set, the results, and whether the test has passed."""


@pytest.mark.parametrize(("parser", "test", "results", "passed"), NAMES)
def test_what_a_name_stands_for(parser: str, test: str, results: dict[str, str], passed: bool) -> None:
    tests = wanted(log_parser=parser, fail_to_pass=[test], pass_to_pass=[test])
    assert score(tests, results).solved is passed
    listed = wanted(log_parser=parser, expected={test: P})
    assert score(listed, results).solved is (passed and set(results.values()) == {P})


EXPECTED: list[tuple[dict[str, str], dict[str, str], bool]] = [
    ({"C.a[b c]": P, "C.a[b - c]": F}, {"C.a[b c]": P, "C.a[b - c]": F}, True),
    # R2E cuts a failed test at its message, wherever ` - ` stands first, and an error not at all.
    ({"C.a[b c]": P, "C.a[b": F}, {"C.a[b c]": P, "C.a[b - c]": F}, True),
    ({"C.a[b c]": P, "C.a[b": F}, {"C.a[b c]": P, "C.a[b - c]": P}, False),
    ({"C.a[b": F}, {"C.a[b - c]": F}, True),
    ({"C.a - no": E, "C.b[c - d] - no": E}, {"C.a": E, "C.b[c - d]": E}, True),
    # A cut name stands for all tests with it, of which none is left over.
    ({"C.a[b": P}, {"C.a[b c]": P, "C.a[b d]": P}, True),
    ({"C.a[b": P}, {"C.a[b c]": P, "C.a[b d]": F}, False),
    ({"C.a[b": P}, {"C.a[b c]": P, "C.a[b d]": S}, False),
    ({"C.a[b": P}, {"C.a[b c]": P, "C.a[e f]": P}, False),
    ({"C.a[b": P}, {"C.a[b c]": P, "C.a[e f]": S}, True),
    ({"C.a[b": P}, {}, False),
]
"""Expected results, those that were found, and whether they are the same."""


@pytest.mark.parametrize(("expected", "results", "same"), EXPECTED)
def test_expected_results_with_spaces(expected: dict[str, str], results: dict[str, str], same: bool) -> None:
    assert score(wanted(log_parser="r2e", expected=expected), results).solved is same


MESSAGES: list[tuple[dict[str, Any], dict[str, str], str]] = [
    (
        {"fail_to_pass": ["a", "b", "c", "d"]}, {"a": F, "b": P, "c": F},
        "fail_to_pass: 3 of 4 did not pass: failed: a, c; missing: d",
    ),
    (
        {"pass_to_pass": ["a", "b", "c"]}, {"a": E, "b": S, "c": "XPASS"},
        "pass_to_pass: 2 of 3 did not pass: error: a; xpass: c",
    ),
    (
        {"fail_to_pass": ["a"], "pass_to_pass": ["b"]}, {"a": S, "b": F},
        "fail_to_pass: 1 of 1 did not pass: skipped: a\npass_to_pass: 1 of 1 did not pass: failed: b",
    ),
    (
        {"fail_to_pass": ["a[b"]}, {"a[b c]": P, "a[b d]": F, "a[b e]": E},
        "fail_to_pass: 1 of 1 did not pass: failed: a[b d]; error: a[b e]",
    ),
    ({"fail_to_pass": ["a\x1b[1m\nb"]}, {}, "fail_to_pass: 1 of 1 did not pass: missing: a\\x1b[1m\\nb"),
    ({"fail_to_pass": ["a" * 999]}, {}, f"fail_to_pass: 1 of 1 did not pass: missing: {'a' * 160}…"),
    (
        {"fail_to_pass": [f"t{number}" for number in range(12)]}, {},
        "fail_to_pass: 12 of 12 did not pass: missing: t0, t1, t2, t3, t4, t5, t6, t7, t8, t9 and 2 more",
    ),
    (
        {"fail_to_pass": ["a", "b"], "absent_passes": True, "verdict": "log"}, {"a": F},
        "fail_to_pass: 1 of 2 did not pass: failed: a",
    ),
    (
        {"expected": {"a": P, "b": F, "c": P}}, {"a": F, "b": F, "d": P},
        "expected: 2 of 3 differ: FAILED in place of PASSED: a; MISSING in place of PASSED: c; "
        "not expected: d",
    ),
    ({"expected": {"a": P}}, {"a": P, "d": P}, "expected: 0 of 1 differ: not expected: d"),
    ({"expected": {"a": S}}, {"a": S}, "expected: no test decides"),
    ({"fail_to_pass": ["a"]}, {"a": P}, ""), ({"expected": {"a": F}}, {"a": F}, ""),
]  # fmt: skip
"""The fields of a task, the results, and what people are shown about them."""


@pytest.mark.parametrize(("fields", "results", "message"), MESSAGES)
def test_which_tests_did_not_pass_is_shown(
    fields: dict[str, Any], results: dict[str, str], message: str
) -> None:
    found = score(wanted(**fields), results)
    assert found.message == message
    assert found.solved is (message == "")


def test_what_is_shown_of_many_tests_is_bounded() -> None:
    names = [f"{'x' * 300}{n}" for n in range(60_000)]
    results = {name: (F, E, S, P)[place % 4] for place, name in enumerate(names)}
    found = score(wanted(fail_to_pass=names, pass_to_pass=names), results)
    assert found.fail_to_pass == 0.25
    assert [line[:40] for line in found.message.split("\n")] == [
        "fail_to_pass: 45000 of 60000 did not pas", "pass_to_pass: 30000 of 60000 did not pas",
    ]  # fmt: skip
    assert len(found.message) < 4_096


def test_each_list_has_its_own_share() -> None:
    tests = wanted(fail_to_pass=["a", "b"], pass_to_pass=["c", "d", "e", "f"], absent_passes=False)
    results = {"a": "PASSED", "b": "FAILED", "c": "XFAIL", "d": "SKIPPED", "e": "XPASS"}
    found = score(tests, results)
    assert (found.solved, found.fail_to_pass, found.pass_to_pass) == (False, 0.5, 0.5)
    lenient = score(tests.model_copy(update={"absent_passes": True, "verdict": "log"}), results)
    assert (lenient.fail_to_pass, lenient.pass_to_pass) == (0.5, 0.75)
    only = score(wanted(pass_to_pass=["c"]), {"c": "PASSED"})
    assert (only.solved, only.fail_to_pass, only.pass_to_pass) == (True, 1.0, 1.0)
    equal = score(wanted(expected={"a": "PASSED", "b": "FAILED"}), {"a": "PASSED", "b": "PASSED"})
    assert (equal.solved, equal.fail_to_pass, equal.pass_to_pass) == (False, 0.5, 1.0)


def test_the_worst_of_several_results_counts() -> None:
    worst_last = ("PASSED", "XFAIL", "XPASS", "SKIPPED", "FAILED", "ERROR")
    for place, better in enumerate(worst_last):
        for worse in worst_last[place:]:
            for order in ((better, worse), (worse, better), (better, worse, better)):
                results = Results()
                for status in order:
                    results.add("a", status)
                results.add("b", "PASSED")
                assert results == {"a": worse, "b": "PASSED"}
                assert results.failures() is (worse in ("FAILED", "ERROR"))


LOGS: list[tuple[str, str, dict[str, str]]] = [
    (
        "pytest",
        "PASSED t.py::a\nFAILED t.py::b - assert 0\nERROR t.py::c\nXFAIL t.py::d\nSKIPPED [1] t.py:3: x",
        {"t.py::a": "PASSED", "t.py::b": "FAILED", "t.py::c": "ERROR", "t.py::d": "XFAIL"},
    ),
    (
        "pytest_v2",
        "\x1b[32mPASSED\x1b[0m t.py::a\nt.py::b FAILED   [ 50%]",
        {"t.py::a": "PASSED", "t.py::b": "FAILED"},
    ),
    ("pytest", "PASSED\n\nPASSED PASSED\n", {"PASSED": "PASSED"}),
    (
        "seaborn",
        "XPASS t.py::a\nall PASSED\nt.py::b ERROR\nt.py::c reached PASSED\nFAILED t.py::d[a - b] - no",
        {"t.py::a": "XPASS", "t.py::b": "ERROR", "t.py::d[a - b]": "FAILED"},
    ),
    (
        "pytest",
        "PASSED t.py::a[b c  d]\nPASSED t.py::a[b - c]\nPASSED t.py::a[x - y - z] \n"
        "PASSED t.py::a[\u2713 \\n]\n"
        "FAILED t.py::b[c - d] - assert 'x - y' == [1]\nFAILED t.py::b[[ - x] - no [1]\n"
        "ERROR t.py::b[c[0] - d]\n"
        "XFAIL t.py::c[d e] - not yet\nSKIPPED t.py::c[e - f] - why\nPASSED [100%]\nPASSED [ 50%]\n"
        "ERROR t.py - x[0]",
        {
            "t.py::a[b c  d]": "PASSED", "t.py::a[b - c]": "PASSED", "t.py::a[x - y - z]": "PASSED",
            "t.py::a[\u2713 \\n]": "PASSED", "t.py::b[c - d]": "FAILED", "t.py::b[[ - x]": "FAILED",
            "t.py::b[c[0] - d]": "ERROR", "t.py::c[d e]": "XFAIL", "t.py::c[e - f]": "SKIPPED",
            "t.py": "ERROR",
        },
    ),
    (
        "pytest",
        "t.py::a[b c] PASSED [ 50%]\n[gw0] [ 50%] PASSED t.py::b[c d] \n[gw12] FAILED t.py::b[e f]\n"
        "t.py::d[e - f] XFAIL (not yet)   [100%]\nt.py::e[f PASSED",
        {"t.py::a[b c]": "PASSED", "t.py::b[c d]": "PASSED", "t.py::b[e f]": "FAILED",
         "t.py::d[e - f]": "XFAIL"},
    ),
    (
        "pytest_options",
        "PASSED t.py::a[/x/y/z]\nPASSED t.py::b[//x]\nPASSED t.py::c[/x/*/y]\nPASSED t.py::d[x/y]\n"
        "FAILED /t/e\nPASSED t.py::f[/x/y z]",
        {
            "t.py::f[/x/y z]": "PASSED",
            "t.py::a[/z]": "PASSED", "t.py::b[//x]": "PASSED", "t.py::c[/x/*/y]": "PASSED",
            "t.py::d[x/y]": "PASSED", "/t/e": "FAILED",
        },
    ),
    (
        "matplotlib",
        "PASSED t.py::a[MouseButton.LEFT]\nFAILED t.py::a[MouseButton.RIGHT]",
        {"t.py::a[1]": "PASSED", "t.py::a[3]": "FAILED"},
    ),
    (
        "r2e",
        "PASSED r/t.py::C::a[b c]\nFAILED r/t.py::a[b::c - d] - no",
        {"C.a[b c]": "PASSED", "a[b.c - d]": "FAILED"},
    ),
    (
        "django",
        "test_a (m.C) ... ok\ntest_b (m.C)\nWhat it does. ... FAIL\ntest_c (m.C) ... skipped 'no'\n"
        "ERROR: test_d (m.C)",
        {
            "test_a (m.C)": "PASSED", "test_b (m.C)": "FAILED", "What it does.": "FAILED",
            "test_c (m.C)": "SKIPPED", "test_d (m.C)": "ERROR",
        },
    ),
    (
        "django",
        "test_a (m.C) ... OK\ntest_b (m.C) ... expected failure\ntest_c (m.C) ... unexpected success\n"
        "test_d (m.C) ... ERROR\nFAIL: test_e (m.C)\ntest_f (m.C) ... ok\nFAIL: test_f (m.C)",
        {
            "test_a (m.C)": "PASSED", "test_b (m.C)": "PASSED", "test_c (m.C)": "FAILED",
            "test_d (m.C)": "ERROR", "test_e (m.C)": "FAILED", "test_f (m.C)": "FAILED",
        },
    ),
    (
        "unittest",
        "test_a (m.C.test_a) ... printed\nok\nok\ntest_b (m.C.test_b) ... x\nFAIL\ntest_c (m.C.test_c)\n"
        "ERROR\nError\ntest_d (m.C.test_d) ... ok\nfail\nWhat it does ... ok",
        {
            "test_a (m.C.test_a)": "PASSED", "test_b (m.C.test_b)": "FAILED", "test_c (m.C.test_c)": "ERROR",
            "test_d (m.C.test_d)": "PASSED", "What it does": "PASSED",
        },
    ),
    (
        "sympy",
        "test_a ok\ntest_b F\ntest_c E\n____ sympy/x/test_y.py:test_d ____\ntest_e s\ntest_f f\n__ test_g __",
        {
            "test_a": "PASSED", "test_b": "FAILED", "test_c": "ERROR", "test_d": "FAILED",
            "test_e": "SKIPPED", "test_f": "PASSED", "test_g": "FAILED",
        },
    ),
    (
        "go",
        "--- PASS: TestA (0.00s)\n    --- FAIL: TestB/x (0.1s)\n--- SKIP: TestC (0.00s)",
        {"TestA": "PASSED", "TestB/x": "FAILED", "TestC": "SKIPPED"},
    ),
    (
        "cargo",
        "test a::b ... ok\ntest c ... FAILED\ntest d ... ignored",
        {"a::b": "PASSED", "c": "FAILED", "d": "SKIPPED"},
    ),
    (
        "jest",
        "  \u2713 adds (3 ms)\n  \u2715 fails\n  \u25cb skipped other\n"
        "\u221a old 1.5s\n\u00d7 bad (2 s)\n\u2193 no",
        {
            "adds": "PASSED", "fails": "FAILED", "other": "SKIPPED",
            "old 1.5s": "PASSED", "bad": "FAILED", "no": "SKIPPED",
        },
    ),
    (
        "tap",
        "ok 1 - a\nnot ok 2 - b\nok 3 - c # SKIP no\n  ok 4 - d # todo\nnot ok 5 - e # TODO later\nok 6\n"
        "ok 7 - takes a while # time=12.5ms",
        {
            "a": "PASSED", "b": "FAILED", "c": "SKIPPED", "d": "SKIPPED", "e": "FAILED",
            "takes a while": "PASSED",
        },
    ),
]  # fmt: skip


TIMES: list[tuple[str, list[str], bool]] = [
    # A time after a name is no part of it.
    ("\u2713 adds (3 ms)", ["adds"], True),
    ("\u2713 adds (3 ms)", ["adds (7 ms)"], True),
    ("\u2713 adds 3ms", ["adds"], True),
    ("\u2713 adds 1.25s", ["adds"], True),
    ("\u2713 adds", ["adds 3ms"], True),
    ("\u2715 adds 3ms", ["adds"], False),
    ("\u2713 adds 3ms\n\u2715 adds 4ms", ["adds"], False),
    ("\u2713 adds\n\u2715 adds 4ms", ["adds"], False),
    # A name that ends in a time is known in full.
    ("\u2713 waits 5s (2 ms)", ["waits 5s"], True),
    ("\u2713 waits 5s (2 ms)", ["waits 5s (3 ms)"], True),
    ("\u2713 waits 5s 2ms", ["waits 5s"], True),
    ("\u2713 waits 5s", ["waits 5s"], True),
    ("\u2713 waits (5 s) (2 ms)", ["waits (5 s)"], True),
    ("\u2713 waits 5s (2 ms)\n\u2715 waits 6s (2 ms)", ["waits 5s"], True),
    ("\u2713 waits 5 s\n\u2715 waits 6 s", ["waits 5 s"], True),
    ("\u2713 waits\n\u2713 waits 5s", ["waits", "waits 5s"], True),
    ("\u2713 waits\n\u2715 waits 5s", ["waits", "waits 5s"], False),
    # No other test stands for it.
    ("\u2715 waits 5s (2 ms)\n\u2713 waits 6s (2 ms)", ["waits 5s"], False),
    ("\u2713 waits 6s (2 ms)", ["waits 5s"], False),
    ("\u2713 waits (6 s) (2 ms)", ["waits (5 s)"], False),
    ("\u2713 waits 6 s", ["waits 5 s"], False),
    ("\u2713 waits", ["waits", "waits 5s"], False),
    ("\u2713 waits 5s", ["waits", "waits 5s"], False),
]
"""A log of the parser `jest`, the names in a data set, and whether their tests have passed."""


@pytest.mark.parametrize(("log", "tests", "passed"), TIMES)
def test_times_after_names(log: str, tests: list[str], passed: bool) -> None:
    results = parse("jest", log)
    listed = wanted(log_parser="jest", verdict="log", fail_to_pass=tests[:1], pass_to_pass=tests[1:])
    assert score(listed, results).solved is passed
    if passed and "FAILED" not in results.values():
        assert score(wanted(log_parser="jest", expected=dict.fromkeys(tests, P)), results).solved


@pytest.mark.parametrize(("parser", "log", "expected"), LOGS)
def test_logs(parser: str, log: str, expected: dict[str, str]) -> None:
    assert parse(parser, log) == expected
    marked = f"PASSED before\n>>>>> Start Test Output\n{log}"
    assert parse(parser, marked, "echo '>>>>> Start Test Output'") == expected
    again = f"{marked}\n>>>>> Start Test Output\n"
    assert parse(parser, again, "echo '>>>>> Start Test Output'") == expected
    assert parse(parser, log, "echo '>>>>> Start Test Output'") == {}


@pytest.mark.parametrize("codes", [(1, 0), (0, 1), (0, 1, 0)])
def test_the_status_of_the_tests(codes: tuple[int, ...]) -> None:
    """The code under test prints what it likes before and after the script does."""
    script = 'echo ">>>>> Test Exit Code: $code"'
    printed = "".join(f">>>>> Test Exit Code: {code}\n" for code in codes)
    assert exit_code(printed, script, 0) == 1
    assert exit_code(printed, "", 3) == 3
    assert exit_code("", script, 0) is None


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("conftest.py", True), ("a/b/conftest.py", True), ("a/__pycache__/x.pyc", True),
        (".git/config", True), ("x.egg-info/entry_points.txt", True), ("src/evil.pth", True),
        ("tests/test_interval.py", True), ("tests/test_interval.py/x", True), ("data/x", True),
        ("data", True), ("run.sh", True), ("tests/helpers.py", True), ("a/tests/x", False),
        ("tests.py", False), ("interval/__init__.py", False),
        ("datas", False), ("\udcff", False), ("setup.py", True), ("a/conftest.py/x.c", False),
        ("run.sh/x", True), ("a/run.sh", False), ("later", True), ("x.egg-information", False),
        *((f"a/{name}/x", True) for name in (
            ".git", ".hg", ".eggs", ".nox", ".pytest_cache", ".tox", ".venv", "__pycache__", "node_modules",
            "x.dist-info", "x.egg-info", "site-packages",
        )),
        *((f"{folder}{name}", True) for folder in ("", "a/") for name in (
            "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg",
            "pyproject.toml", "noxfile.py", ".coveragerc", "sitecustomize.py", "usercustomize.py", "x.pth",
            "x.pyc", "x.pyo", "package.json", "jest.config.js", "vitest.config.ts", "vite.config.ts",
            "babel.config.js", ".babelrc", ".babelrc.json", ".mocharc.yml", ".gitattributes", ".gitmodules",
        )),
    ],
)  # fmt: skip
def test_what_the_policy_cannot_change(path: str, kept: bool) -> None:
    tests = wanted(
        fail_to_pass=["a"],
        patch=TESTS_PATCH,
        protected=["data/"],
        repository={"path": "/t", "hidden": ["/t/run.sh", "later", "/elsewhere/datas"]},
        files={"written/./test.js": ""},
    )
    assert protection(tests)(b"written/test.js")
    assert protection(tests)(path.encode("utf-8", "surrogateescape")) is kept


def signed(secret: str, *entries: tuple[str, str, str]) -> list[bytes]:
    """Return the lines of a report as the plugin writes them: each signs the one before, too."""
    lines, last = [], b""
    for kind, test, status in entries:
        text = f"{kind} {test.encode().hex() or '-'} {status}".encode()
        last = sign(secret.encode(), last, text)
        lines.append(last + b" " + text + b"\n")
    return lines


END = ("end", "", "-")


def test_a_report_that_is_not_genuine_is_empty() -> None:
    forged = b"0 end - -\n00 test 61 PASSED\n"
    assert not read_report(forged, "secret", "pytest").complete
    assert not read_report(b"", "secret", "pytest").complete


def test_a_report_is_believed_up_to_the_first_line_that_is_not_genuine() -> None:
    tests = [("test", "t.py::a", "PASSED"), ("test", "t.py::b x", "FAILED")]
    controls = [("control", "t.py::a", "FAILED"), ("control", "t.py::b", "TAMPERED")]
    lines = signed("secret", *tests, controls[0], END)
    whole = read_report(b"".join(lines), "secret", "pytest")
    assert (whole.complete, whole.tampered, whole.controlled) == (True, set(), {"t.py::a"})
    assert whole.results == {"t.py::a": "PASSED", "t.py::b x": "FAILED"}
    assert read_report(b"".join(lines), "secret", "r2e").results == {"a": "PASSED", "b x": "FAILED"}
    tampered = read_report(b"".join(signed("secret", *controls, END)), "secret", "pytest")
    assert (tampered.complete, tampered.tampered) == (True, {"t.py::b"})
    for broken in (
        lines[:-1], lines[1:], [lines[0], *lines[2:]], [*lines, lines[-1]], [*lines, b"x\n"],
        [*lines[:-1], lines[-1][:-1]], signed("other", *tests, END),
    ):  # fmt: skip
        assert not read_report(b"".join(broken), "secret", "pytest").complete
    assert read_report(b"".join(lines[:1]), "secret", "pytest").results == {"t.py::a": "PASSED"}


DOUBTS: list[tuple[dict[str, Any], list[tuple[str, str, str]], set[str]]] = [
    ({"fail_to_pass": ["t.py::a"]}, [("test", "t.py::a", P)], {"t.py::a"}),
    ({"fail_to_pass": ["t.py::a"]}, [("test", "t.py::a", P), ("control", "t.py::a", F)], set()),
    ({"fail_to_pass": ["t.py::a"]}, [("test", "t.py::a", F)], set()),
    ({"fail_to_pass": ["t.py::a"]}, [("test", "t.py::a", "TAMPERED")], {"t.py::a"}),
    ({"pass_to_pass": ["t.py::a"]}, [("test", "t.py::a", P)], set()),
    ({"pass_to_pass": ["t.py::a[b"]}, [("test", "t.py::a[b c]", "TAMPERED")], {"t.py::a[b c]"}),
    ({"pass_to_pass": ["t.py::b"]}, [("test", "t.py::a", "TAMPERED")], set()),
    # Each test that a cut name stands for has to be believed.
    (
        {"fail_to_pass": ["t.py::a[b"]},
        [("test", "t.py::a[b c]", P), ("control", "t.py::a[b c]", F), ("test", "t.py::a[b d]", P)],
        {"t.py::a[b d]"},
    ),
    ({"fail_to_pass": ["my t.py::a"]}, [("test", "my t.py::a", P)], {"my t.py::a"}),
    ({"fail_to_pass": ["m.py::m.doc"]}, [("test", "m.py::m.doc", P)], set()),
    ({"expected": {"C.a[b c]": P}, "log_parser": "r2e"}, [("test", "t.py::C::a[b c]", P)], {"C.a[b c]"}),
]
"""The fields of a task, the lines of a report, and the tests that are not believed."""


@pytest.mark.parametrize(("fields", "lines", "doubtful"), DOUBTS)
def test_which_tests_are_not_believed(
    fields: dict[str, Any], lines: list[tuple[str, str, str]], doubtful: set[str]
) -> None:
    tests = wanted(**fields)
    report = read_report(b"".join(signed("secret", *lines, END)), "secret", tests.log_parser)
    assert report.complete
    assert report.doubtful(tests) == doubtful


def test_a_case_that_was_found_and_not_run_is_missing() -> None:
    lines = [
        ("collected", "t.py::a[b c]", "-"),
        ("collected", "t.py::a[b d]", "-"),
        ("test", "t.py::a[b c]", P),
    ]
    report = read_report(b"".join(signed("secret", *lines, END)), "secret", "pytest")
    assert report.results == {"t.py::a[b c]": P, "t.py::a[b d]": "MISSING"}
    found = score(wanted(fail_to_pass=["t.py::a[b"]), report.results)
    assert found.message == "fail_to_pass: 1 of 1 did not pass: missing: t.py::a[b d]"


@pytest.mark.attack(
    "the name of a test holds line ends, spaces or the name of another test",
    boundary="evaluation",
    surface="handler `swe`",
    stopped_by="names are sent in hexadecimal digits, and are never read as lines of a log",
)
def test_a_name_is_never_read_as_another_line() -> None:
    name = "t.py::x\nPASSED t.py::a"
    lines = signed("secret", ("test", name, "PASSED"), ("test", "PASSED t.py::b", "FAILED"), END)
    results = read_report(b"".join(lines), "secret", "pytest").results
    assert results == {name: "PASSED", "PASSED t.py::b": "FAILED"}
    for test in ("t.py::x", "t.py::a", "t.py::b"):
        found = score(wanted(fail_to_pass=[test]), results)
        assert found.message == f"fail_to_pass: 1 of 1 did not pass: missing: {test}"


def test_pytest_loads_the_reports_plugin_beside_what_the_task_sets() -> None:
    client: Any = None
    files = ReportFiles(client, "/p")
    assert files.environment({"A": "1"}) == {
        "A": "1", "PYTEST_ADDOPTS": "-p rollyard_report", "PYTHONPATH": "/p",
    }  # fmt: skip
    given = {"PYTEST_ADDOPTS": "-q", "PYTHONPATH": "/lib:/more"}
    assert files.environment(given) == {
        "PYTEST_ADDOPTS": "-p rollyard_report -q", "PYTHONPATH": "/p:/lib:/more",
    }  # fmt: skip


class Folder:
    """A sandbox with a folder of files, which are read in parts of a few bytes."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, int]] = {}

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.files[path] = (data, mode)

    async def read_file(self, path: str, *, max_bytes: int, offset: int) -> FileContent:
        if path not in self.files:
            raise FileError(path, reason="FileNotFound")
        data, mode = self.files[path]
        return FileContent(data[offset : offset + 100], offset, len(data), mode)


async def test_a_report_is_read_to_its_end() -> None:
    folder: Any = Folder()
    files = ReportFiles(folder, "/p")
    tests = wanted(
        fail_to_pass=["t.py::b[1]", "t.py::a", "t.py::b[2", "src/m.py::m.doc"], pass_to_pass=["u.py::C::x[y"],
        files={"./h.py": ""}, patch=TESTS_PATCH,
    )  # fmt: skip
    await files.write(tests, "/work/repo")
    data, mode = folder.files["/p/secret"]
    task = json.loads(data)
    assert (mode, task["names"], task["folder"]) == (0o600, ["t.py::a", "t.py::b"], "/work/repo")
    assert task["files"] == ["h.py", "t.py", "tests/test_interval.py", "u.py"]
    assert task["cut"] == ["t.py::b", "u.py::C::x"]
    assert {"/p/rollyard_report.py", "/p/sitecustomize.py", "/p/encodings/__init__.py"} < folder.files.keys()
    missing = await files.read("pytest")
    assert (missing.complete, missing.results) == (False, {})
    entries = [("test", f"t.py::{number}", "PASSED") for number in range(9)]
    lines = b"".join(signed(task["secret"], *entries, END))
    folder.files["/p/report"] = (lines, 0o644)
    found = await files.read("pytest")
    assert (found.complete, len(found.results)) == (True, 9)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python -m pytest -rA", "pytest"), ("python /env/bin/pytest a", "pytest"), ("python -c pytest", ""),
        ("python -W ignore -X dev -Bm pytest", "pytest"), ("python -mpytest", "pytest"), ("python", ""),
        ("python -m pip install pytest", "pip"), ("python -u setup.py test", "setup.py"),
    ],
)  # fmt: skip
def test_the_program_of_an_interpreter(command: str, program: str) -> None:
    words = program_of(command.encode().split())
    assert [word.decode() for word in words[:1]] == ([program] if program else [])


def test_all_lists_are_named_by_their_tests() -> None:
    assert set(FAILS).isdisjoint(PASSES)
