"""The repository of a software engineering task, and its hidden tests (handler `swe`)."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from rollyard_crds.base import Model, Path

Code = Annotated[str, Field(max_length=4 << 20)]
TestName = Annotated[str, Field(min_length=1, max_length=4096)]
TestNames = Annotated[list[TestName], Field(max_length=100_000)]
ShortStatus = Annotated[str, Field(min_length=1, max_length=16)]
LogParser = Literal[
    "pytest",
    "pytest_options",
    "pytest_v2",
    "matplotlib",
    "seaborn",
    "r2e",
    "django",
    "unittest",
    "sympy",
    "go",
    "cargo",
    "jest",
    "tap",
]
PYTEST_PARSERS: Final = frozenset({"pytest", "pytest_options", "pytest_v2", "matplotlib", "seaborn", "r2e"})
"""The parsers of pytest's output. They differ in how they name tests."""
DROPPED_TESTS: Final = "dropped_tests"
"""The key in a task's metadata for the names in its row that no test runner reports, which are left out."""

_SETS_OPTIONS: Final = re.compile(r"\bPYTEST_ADDOPTS=")
_SETS_PATH: Final = re.compile(r"\bPYTHONPATH=(.*)")
_KEEPS_PATH: Final = re.compile(r"[\"']?\$(?:PYTHONPATH\b|\{PYTHONPATH[:}])")


class Repository(Model):
    """The repository that the policy changes: a folder of the image, or one that Init makes."""

    model_config = ConfigDict(alias_generator=None, extra="forbid")

    path: Path = "repository"
    """The folder in the sandbox, absolute or relative to the work folder."""
    source: Path | None = None
    """A folder or a tar file in the image, from which Init makes the folder; default: it is there already."""
    archive: Annotated[str, Field(max_length=6 << 20)] | None = None
    """A tar file in base64, which may be compressed, from which Init makes the folder."""
    unpack: Path | None = None
    """The folder into which the archive or source is unpacked, where it is not `path` itself."""
    patch: Annotated[str, Field(max_length=1 << 20)] | None = None
    """A diff that Init applies, such as the bug that the policy has to find."""
    hidden: Annotated[list[Path], Field(max_length=256)] = Field(default_factory=list)
    """Files and folders of the image that Init removes before Run. They are there in Eval."""

    @model_validator(mode="after")
    def _one_origin(self) -> Repository:
        if self.source is not None and self.archive is not None:
            raise ValueError("give at most one of 'source' and 'archive'")
        if self.unpack is not None and self.source is None and self.archive is None:
            raise ValueError("'unpack' needs 'source' or 'archive'")
        return self


class SweTests(Model):
    """The hidden tests of a repository, which Eval runs in a fresh sandbox with the policy's changes."""

    model_config = ConfigDict(alias_generator=None, extra="forbid")

    repository: Repository = Field(default_factory=Repository)
    """Where the repository is."""
    script: Annotated[str, Field(min_length=1, max_length=4 << 20)]
    """A bash script that runs the tests in the repository's folder."""
    log_parser: LogParser = "pytest"
    """How the tests print their results."""
    verdict: Literal["report", "log"] | None = None
    """Where results are taken from: a report of each test, which the repository's code cannot forge by
    ordinary means, or what the script prints. The report is for pytest, needs a script that leaves
    PYTEST_ADDOPTS and the beginning of PYTHONPATH in force, and is the default where it is possible."""
    fail_to_pass: TestNames = Field(default_factory=list)
    """Tests that fail before the task is solved, and must pass."""
    pass_to_pass: TestNames = Field(default_factory=list)
    """Tests that must still pass, or be skipped."""
    absent_passes: bool = False
    """Whether a test that has no result in a log counts as passed, as for rows that list failures only."""
    expected: Annotated[dict[TestName, ShortStatus], Field(max_length=100_000)] | None = None
    """The result of each test, instead of the two lists. All must match, including failures."""
    patch: Code | None = None
    """A diff with the hidden tests, which Eval applies after the policy's changes."""
    files: Annotated[dict[Path, Code], Field(max_length=1024)] = Field(default_factory=dict)
    """Hidden files by their path in the repository, which Eval writes after the policy's changes."""
    protected: Annotated[list[Path], Field(max_length=4096)] = Field(default_factory=list)
    """Files and folders of the repository to which the policy's changes are dropped, as they are for the
    hidden tests."""
    submission: Literal["folder", "answer"] = "folder"
    """What the policy submits: its changes to the folder, or a diff as its answer."""
    max_bytes: Annotated[int, Field(ge=1, le=64 << 20)] = 16 << 20
    """The limit of all changed files together, in bytes. A policy that leaves more is scored 0."""

    @model_validator(mode="after")
    def _complete(self) -> SweTests:
        listed = bool(self.fail_to_pass or self.pass_to_pass)
        if listed == bool(self.expected):
            raise ValueError(
                "give 'fail_to_pass' or 'pass_to_pass', which must not both be empty, or else 'expected'"
            )
        problem = report_problem(self.log_parser, self.script)
        if self.verdict == "report" and problem:
            raise ValueError(f"'verdict: report' needs {problem}")
        if self.verdict is None:
            self.verdict = "log" if problem else "report"
        return self


def report_problem(log_parser: str, script: str) -> str:
    """Return what the verdict `report` needs and lacks with this parser and script, or ""."""
    if log_parser not in PYTEST_PARSERS:
        return "a log_parser of pytest"
    if _SETS_OPTIONS.search(script):
        return "a script that does not set PYTEST_ADDOPTS"
    if any(not _KEEPS_PATH.match(value) for value in _SETS_PATH.findall(script)):
        return 'a script whose PYTHONPATH begins with the one before, as in PYTHONPATH="$PYTHONPATH:src"'
    return ""
