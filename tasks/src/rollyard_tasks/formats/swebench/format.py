"""The format `swebench`: rows of several data sets, which are distinguished by their columns."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from rollyard_crds.fields.swe_tests import DROPPED_TESTS, LogParser

from rollyard_tasks.formats.ids import task_id
from rollyard_tasks.formats.interface import Row, RowRefused, TaskFormat
from rollyard_tasks.formats.swebench.diffs import changed_files, files_to_test

_REQUEST: Final = (
    "Change the repository in {folder} so that this is resolved. Tests that you cannot see will check it.\n\n"
)
_INTERFACE: Final = "\n\nThe tests use this interface:\n\n"
_TESTBED: Final = "/testbed"
_KEPT: Final = ("repo", "base_commit", "version", "difficulty", "created_at", "language")
"""Columns that are kept in the metadata."""
_R2E_HIDDEN: Final = ("/r2e_tests", "r2e_tests", "run_tests.sh")
_R2E_SCRIPT: Final = """\
cd /testbed
[ -e r2e_tests ] || ln -s /r2e_tests r2e_tests
bash run_tests.sh
"""


_NOTHING: Final[Sequence[Any]] = ("", "null", [])
"""What a column may hold instead of null, where a table of several data sets was written as texts."""
_NAMED: Final = 10  # The most names that a message shows.
_EXPECTED: Final = "expected_output_json"
_UNREPORTED: Final = re.compile(
    r"(?:\[(?:\d+%?\])?|\d+%\]|(?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS):?|\.{3,}|[_-]{3,}|={3,}.*)?"
)
"""Names that no test runner reports, without white space. They come from logs in which another word was where
a name should be: `PASSED [100%]` and `PASSED [ 50%]` after a test that prints, `SKIPPED [1]`, headings."""
_KNOWN: Final = frozenset(get_args(LogParser))
_OTHERS: Final = {
    "pytest_with_options": "pytest_options",
    "gotest": "go",
    "go_test": "go",
    "rust": "cargo",
    "cargo_test": "cargo",
    "vitest": "jest",
    "python_unittest": "unittest",
    "tap_node": "tap",
}
"""The names of log parsers in other projects' rows, and what they are called here."""
_ACTIVATE: Final = "source /opt/miniconda3/bin/activate\nconda activate testbed"
"""The commands that prepare the environment of an image of SWE-bench."""
_START: Final = ">>>>> Start Test Output"
_END: Final = ">>>>> End Test Output"
"""The lines around the output of the tests, as SWE-bench's scripts print them."""


class SweBenchFormat(TaskFormat):
    """Reads rows of SWE-bench 5 and its like; the handler is `swe`.

    The columns that a row fills decide: `eval_script` is SWE-bench 5; `install_config` is SWE-rebench, whose
    second version has a list of test commands; `expected_output_json` is R2E; `image_name` without
    `test_patch` is SWE-smith, whose patch is the bug; `test_patch` alone is SWE-bench before version 5, or
    SWE-Gym. The last two do not say how their tests are run. `tasks.specs` does.

    Names that no test runner reports, such as `[100%]`, are left out of the tests, and are in the metadata
    as `dropped_tests`.
    """

    columns = (
        ("instance_id", "eval_script"),
        ("instance_id", "install_config"),
        ("instance_id", "test_patch"),
        ("instance_id", "image_name"),
        ("docker_image", "expected_output_json"),
    )

    def __init__(self) -> None:
        self._specs: Mapping[str, Any] | None = None

    def configure(self, specs: Mapping[str, Any]) -> None:
        """Take the file of `tasks.specs`: `repos`, by name, with `log_parser` and `versions`.

        Raises:
            RowRefused: The file has another form.
        """
        repos = Row(specs, 0, "specs").row("repos")
        for name in repos.values:
            repo = repos.row(name)
            repo.text("log_parser")
            versions = repo.row("versions")
            for version in versions.values:
                versions.row(version).text("test_cmd")
        self._specs = repos.values

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row."""
        row = row.filled(_NOTHING)
        filled = row.values
        row.text("image", "")  # A container image in all of these data sets.
        if _EXPECTED in filled:
            fields = _r2e(row)
        elif "eval_script" in filled:
            fields = _version_5(row)
        elif "install_config" in filled:
            fields = _rebench(row)
        elif "test_patch" in filled:
            fields = self._classic(row)
        elif "image_name" in filled:
            fields = _smith(row)
        else:
            raise RowRefused(
                "eval_script",
                "is missing, and no other column tells the data set: install_config (SWE-rebench), "
                "expected_output_json (R2E), test_patch (SWE-bench, SWE-Gym), image_name (SWE-smith)",
            )
        dropped = fields.pop(DROPPED_TESTS)
        folder = fields["swe"]["repository"]["path"]
        shown = folder if folder.startswith("/") else f"the folder {folder}"
        interface = row.text("interface", "").strip()
        fields["prompt"] = _REQUEST.format(folder=shown) + row.text("problem_statement")
        fields["prompt"] += f"{_INTERFACE}{interface}" if interface else ""
        if "instance_id" in filled:
            fields["id"] = task_id(row.text("instance_id"))
        fields["metadata"] = {name: filled[name] for name in _KEPT if name in filled}
        if dropped:
            fields["metadata"][DROPPED_TESTS] = list(dict.fromkeys(dropped))
        return fields

    def _classic(self, row: Row) -> dict[str, Any]:
        repo, version = row.text("repo"), row.text("version")
        if self._specs is None:
            raise RowRefused(
                "eval_script",
                "is missing: rows from before SWE-bench 5 need tasks.specs, a file that "
                "scripts/swebench_specs.py makes",
            )
        spec = Row(self._specs, row.number).row(repo, optional=True)
        if not spec.values:
            raise RowRefused("repo", "has no entry in tasks.specs")
        version_spec = spec.row("versions").row(version, optional=True)
        if not version_spec.values:
            raise RowRefused("version", "has no entry for this repository in tasks.specs")
        files = _labels(repo, files_to_test(row.text("test_patch")))
        preparation = [_ACTIVATE, f"cd {_TESTBED}", *_texts(version_spec, "eval_commands")]
        install = version_spec.text("install", "")
        if install:
            preparation.append(install)
        name = row.text("instance_id")
        image = f"swebench/sweb.eval.x86_64.{name.lower().replace('__', '_1776_')}:latest"
        if "environment_setup_commit" not in row.values:
            image = f"xingyaoww/sweb.eval.x86_64.{name.lower().replace('__', '_s_')}:latest"
        script = _script_of(_TESTBED, preparation, [version_spec.text("test_cmd")], files)
        log_parser = _parser(row, spec.text("log_parser"), "repo")
        return _task(row, row.text("image", image), _TESTBED, script, log_parser, row.text("test_patch"))


def _version_5(row: Row) -> dict[str, Any]:
    script = row.text("eval_script")
    log_parser = _parser(row, row.text("log_parser"), "log_parser")
    kind = row.text("eval_type", "pass_and_fail")
    if kind not in ("pass_and_fail", "fail_only"):
        raise RowRefused("eval_type", "must be pass_and_fail or fail_only")
    fields = _task(row, row.text("image", ""), _TESTBED, script, log_parser, "")
    # The script holds the hidden tests as a diff. What the policy does to these files must not be in its way.
    fields["swe"]["protected"] = changed_files(script)
    fields["swe"]["absent_passes"] = kind == "fail_only"
    return fields


def _rebench(row: Row) -> dict[str, Any]:
    config = row.row("install_config")
    listed = _is_list(config, "test_cmd")
    commands = _texts(config, "test_cmd") if listed else [config.text("test_cmd")]
    if not commands:
        raise RowRefused(config.name("test_cmd"), "must not be empty")
    log_parser = _parser(config, config.text("log_parser", "pytest"), "log_parser")
    patch = row.text("test_patch")
    folder, name = _TESTBED, row.text("instance_id")
    if listed:
        # The second version has images of its own, in which the folder has the repository's name.
        folder, preparation, files = f"/{row.text('repo').split('/')[-1]}", [], []
        image = row.text("image_name", "" if "repository" in row.values else None)
    else:
        preparation, files = [_ACTIVATE], files_to_test(patch)
        image = f"swerebench/sweb.eval.x86_64.{name.lower().replace('__', '_1776_')}:latest"
        image = "" if "repository" in row.values else image
        for column in ("image", "image_name", "docker_image"):
            image = row.text(column, image)
    if "repository" in row.values:
        preparation, folder = [], "."
    script = _script_of(folder, preparation, commands, files)
    fields = _task(row, image, folder, script, log_parser, patch)
    if len(commands) > 1:
        fields["swe"]["verdict"] = "log"  # A report covers one run of pytest.
    return fields


def _smith(row: Row) -> dict[str, Any]:
    bug = row.text("patch")
    tests = _names(row, "FAIL_TO_PASS")[0] + _names(row, "PASS_TO_PASS")[0]
    command = "python -m pytest -rA --color=no --tb=short -p no:cacheprovider"
    script = _script_of(_TESTBED, [_ACTIVATE], [command], _files_of(tests))
    fields = _task(row, row.text("image_name"), _TESTBED, script, "pytest", "", bug=bug)
    fields["swe"]["protected"] = _files_of(tests)
    return fields


def _r2e(row: Row) -> dict[str, Any]:
    if row.values.get("repo_name") == "tornado":
        raise RowRefused("repo_name", "has test output that no parser here reads")
    statuses = row.row(_EXPECTED).values
    if not all(isinstance(status, str) for status in statuses.values()):
        raise RowRefused(_EXPECTED, "must be an object of texts")
    tests, dropped = _reported(row, _EXPECTED, list(statuses))
    if not tests:
        raise RowRefused(_EXPECTED, "must not be empty")
    repository = {"path": _TESTBED, "hidden": list(_R2E_HIDDEN)}
    return {
        "sandbox": {"image": _image(row.text("docker_image"))},
        "swe": {
            "repository": repository,
            "script": _R2E_SCRIPT,
            "log_parser": "r2e",
            "expected": {test: statuses[test] for test in tests},
            "protected": list(_R2E_HIDDEN[1:]),
        },
        DROPPED_TESTS: dropped,
    }


def _task(
    row: Row, image: str, folder: str, script: str, log_parser: str, patch: str, *, bug: str = ""
) -> dict[str, Any]:
    """Return the fields of a task that all data sets but R2E share, and the names that are left out."""
    fails, dropped = _names(row, "FAIL_TO_PASS")
    passes, others = _names(row, "PASS_TO_PASS")
    if not fails:
        raise RowRefused("FAIL_TO_PASS", "must not be empty: a patch that changes nothing would pass")
    repository: dict[str, Any] = {"path": _folder(row, folder)}
    if "repository" in row.values:
        repository |= row.row("repository").values
    if bug:
        repository["patch"] = bug
    swe: dict[str, Any] = {
        "repository": repository,
        "script": script,
        "log_parser": log_parser,
        "fail_to_pass": fails,
        "pass_to_pass": passes,
    }
    if patch:
        swe["patch"] = patch
    fields: dict[str, Any] = {"swe": swe, DROPPED_TESTS: dropped + others}
    if image:
        fields["sandbox"] = {"image": _image(image)}
    gold = bug or row.text("patch", "")
    if gold:
        fields["solution"] = [_applying(gold, repository["path"], reverse=bool(bug))]
    return fields


def _folder(row: Row, folder: str) -> str:
    """Return the folder of the repository. The column `repository`, which is our own, may name another."""
    if "repository" not in row.values:
        return folder
    return row.row("repository").text("path", "repository")


def _applying(patch: str, folder: str, *, reverse: bool) -> dict[str, Any]:
    """Return the call of the tool `bash` that applies a diff. The end marker is a line not in the diff."""
    last = "END_OF_PATCH"
    while last in patch:
        last += "_"
    how = "git apply --whitespace=nowarn" + (" --reverse" if reverse else "")
    end = "" if patch.endswith("\n") else "\n"
    command = f"cd {folder!r} && {how} - <<'{last}'\n{patch}{end}{last}"
    return {"name": "bash", "arguments": {"command": command}}


def _image(name: str) -> str:
    return name if "://" in name or name.startswith("/") else f"docker://{name}"


def _names(row: Row, field: str) -> tuple[list[str], list[str]]:
    """Return a list of test names, which may be a JSON text, and the names that are left out of it.

    A missing list is empty.
    """
    return _reported(row, field, row.items(field) if field in row.values else [])


def _reported(row: Row, field: str, listed: list[Any]) -> tuple[list[str], list[str]]:
    """Return the names of tests that a test runner can report, and the others.

    Raises:
        RowRefused: A name is not a text, or none is left of those that have to pass.
    """
    for index, name in enumerate(listed):
        if not isinstance(name, str):
            raise RowRefused(f"{row.name(field)}[{index}]", "must be a text")
    dropped = [name for name in listed if _UNREPORTED.fullmatch("".join(name.split()))]
    left_out = set(dropped)
    names = [name for name in listed if name not in left_out]
    if dropped and not names and field != "PASS_TO_PASS":
        problem, shown = "has no name that a test runner reports", ", ".join(map(ascii, dropped[:_NAMED]))
        raise RowRefused(field, problem, quoting=f"{field}: {problem} (got {shown})")
    return names, dropped


def _is_list(row: Row, field: str) -> bool:
    """Return whether a field is a list, or the JSON text of one. `[ -f x ] && pytest` is a command."""
    try:
        row.items(field)
    except RowRefused:
        return False
    return True


def _texts(row: Row, field: str) -> list[str]:
    values = row.items(field) if field in row.values else []
    for index, text in enumerate(values):
        if not isinstance(text, str) or not text:
            raise RowRefused(f"{row.name(field)}[{index}]", "must be a text that is not empty")
    return values


def _parser(row: Row, name: str, field: str) -> str:
    """Return the name of a parser, such as `pytest` for `parse_log_pytest`.

    Raises:
        RowRefused: There is no such parser.
    """
    short = name.removeprefix("parse_log_").removeprefix("parse_").lower()
    short = _OTHERS.get(short, short)
    if short not in _KNOWN:
        raise RowRefused(row.name(field), f"no such log parser; known are: {', '.join(sorted(_KNOWN))}")
    return short


def _script_of(
    folder: str, preparation: Sequence[str], commands: Sequence[str], arguments: Sequence[str]
) -> str:
    """Return a script that runs the test commands in a folder, and exits with the status of the last one.

    Args:
        folder: The absolute path of the repository.
        preparation: Commands that prepare the tests. They may fail, as reinstalling does without a network.
        commands: The test commands.
        arguments: The files or labels that are added to each command.
    """
    added = "".join(f" {shlex.quote(argument)}" for argument in arguments)
    lines = [*preparation, f"cd {shlex.quote(folder)}", f"echo '{_START}'"]
    lines += [f"{command}{added}" for command in commands]
    return "\n".join([*lines, "rollyard_status=$?", f"echo '{_END}'", "exit $rollyard_status", ""])


def _labels(repository: str, files: Sequence[str]) -> list[str]:
    """Return what the test command of a repository takes for these files; Django takes modules."""
    if repository != "django/django":
        return list(files)
    return [
        file.removesuffix(".py").removeprefix("tests/").replace("/", ".")
        for file in files
        if file.endswith(".py")
    ]


def _files_of(tests: Sequence[str]) -> list[str]:
    """Return the files in pytest's test names, each once and in their order."""
    return list(dict.fromkeys(test.split("::")[0] for test in tests if "::" in test))
