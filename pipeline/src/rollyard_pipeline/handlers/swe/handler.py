"""The handler `swe`: the policy changes a repository, and hidden tests run in a fresh sandbox.

Diffs are applied to the repository by the sandbox's git. `report_plugin` writes a signed report of a run of
pytest in the sandbox, which is read and checked here.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
import logging
import posixpath
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Final

from rollyard_crds.fields.signals import SHIPPED
from rollyard_crds.fields.swe_tests import SweTests
from rollyard_crds.task import Task
from rollyard_process.log_text import one_line
from rollyard_sandbox.client import ExecClient, ExecResult
from rollyard_sandbox.errors import FileError
from rollyard_tasks.formats.swebench.diffs import changed_files

from rollyard_pipeline.errors import SetupFailed, TaskInvalid
from rollyard_pipeline.handlers.base import READ_AND_RUN, Evaluation, FolderChanges, Handler, StageContext
from rollyard_pipeline.handlers.blocks import Block, State, fenced_blocks
from rollyard_pipeline.handlers.swe.log_parsers import exit_code, logged_name, parse
from rollyard_pipeline.handlers.swe.report_plugin import NAME, REPORT, SECRET, plain, sign
from rollyard_pipeline.handlers.swe.report_plugin import TAMPERED as TAMPERED_STATUS
from rollyard_pipeline.handlers.swe.results import (
    MISSING,
    PASSED,
    Reported,
    Results,
    deciding,
    in_a_function,
    score,
)
from rollyard_pipeline.handlers.tables import words
from rollyard_pipeline.sabotage import SABOTAGED, TEST_TIMEOUT

_MAX_BYTES: Final = 32 << 20
_SOURCES: Final = {
    "encodings/__init__.py": "report_start.py",
    "sitecustomize.py": "report_start.py",
    f"{NAME}.py": "report_plugin.py",
}
"""The files that start the report, and the modules of this package that they are."""


_GIT: Final = ("git", "-c", "safe.directory=*", "apply", "--whitespace=nowarn")
_APPLY_SECONDS: Final = 120.0
_LABELS: Final = frozenset({"diff", "patch"})
_HUNK: Final = re.compile(r"@@ -[0-9]{1,9}(?:,([0-9]{1,9}))? \+[0-9]{1,9}(?:,([0-9]{1,9}))? @@")
_DIFF: Final = re.compile(
    r"^(?:--- .++\n\+\+\+ .++\n@@ -[0-9]|"
    r"diff --git .++\n(?:--- |(?:old|new|deleted|similarity|rename|copy|index)\b))",
    re.MULTILINE,
)
"""The header of a file with its first hunk, or with what git says about a file that is moved or created."""
_NAMES: Final = re.compile(
    r"^(?:--- (.++)\n\+\+\+ (.++)\n@@ -|rename from (.++)\nrename to (.++)$)", re.MULTILINE
)
_SIDE: Final = re.compile(r"[ab]/")


log = logging.getLogger(__name__)

_LOG_BYTES: Final = 16 << 20
"""The largest number of bytes of the tests' output that are read. A longer log is not judged."""
_SHOWN: Final = 10  # The largest number of tests that a message names.
PATCH_REFUSED: Final = "PatchDoesNotApply"
TAMPERED: Final = "TestsTampered"
NO_RESULTS: Final = "NoTestResults"
LOG_TOO_LONG: Final = "TestLogTooLong"
_LOG_WARNING: Final = (
    "These results are what the tests printed (verdict: log). The policy's code can print the same."
)
_NO_FAILURE: Final = "The test command failed, and none of the results is a failure, so that none counts."
_NO_REPORT: Final = (
    "There is no report of the tests (verdict: report), or it has no end. The script must start pytest as "
    "`pytest`, `python -m pytest` or `coverage run -m pytest`, and pytest must come to its end."
)
_SHELL: Final = ("bash", "--noprofile", "--norc", "-c")
_PROTECTED_FOLDERS: Final = words(
    ".git .hg .eggs .nox .pytest_cache .tox .venv __pycache__ node_modules *.dist-info *.egg-info",
    "site-packages conftest encodings sitecustomize usercustomize",
)
"""Folders at any depth that the policy cannot change for Eval: histories, whose settings start programs;
caches, from which compiled code is loaded without a look at its source; environments; metadata, which name
plugins of pytest; and packages that hide a file of the next list."""
_PROTECTED_FILES: Final = words(
    "conftest.* pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini setup.cfg pyproject.toml setup.py",
    "versioneer.py makefile gnumakefile noxfile.py .coveragerc sitecustomize.* usercustomize.* *.pth *.pyc",
    "*.pyo package.json jest.config.* vitest.config.* vite.config.* babel.config.* .babelrc* .mocharc.*",
    ".gitattributes .gitmodules",
)
"""Files at any depth that say how tests are run, or that an interpreter runs at its start."""
_TEST_FOLDER: Final = re.compile(r"tests?|\w+[_-]tests?|tests?[_-]\w+", re.IGNORECASE)
"""The names of folders that hold tests, and what tests share. A `testing` further down may be the product."""


class SweHandler(Handler):
    """Returns reward 1.0 if the hidden tests have the results that they should have, else 0.0.

    The policy's changes of the repository's folder are carried into a fresh sandbox, except for those of
    tests, of files that decide how tests run, and of caches. The hidden tests come after them. The policy's
    code runs in the processes of the tests, so it could forge a log. `swe.verdict: report` takes the results
    from a plugin of pytest instead; see docs/handlers.md for what remains possible.
    """

    reward_range = SHIPPED["swe"].reward
    components = SHIPPED["swe"].components
    eval_sandbox = "fresh"
    judges_answers = True

    def check(self, task: Task) -> list[str]:
        """Return a problem if the task has no repository with tests."""
        return [] if task.swe is not None else ["swe: required by the handler 'swe'"]

    def judges_answer(self, task: Task) -> bool:
        """Return whether the policy hands in a diff. Its changes of the folder are not kept."""
        return task.swe is not None and task.swe.submission == "answer"

    def changes(self, task: Task, workdir: str) -> FolderChanges | None:
        """Return the repository's folder. Where the answer is a diff, all changes in it are dropped."""
        tests = task.swe
        if tests is None:
            return None
        # A diff that is an answer is the policy's, too, and so is any damage that it does to the sandbox.
        protected = (lambda _path: True) if tests.submission == "answer" else protection(tests)
        return FolderChanges(_folder(tests, workdir), tests.max_bytes, protected)

    def folder(self, task: Task, workdir: str) -> str:
        """Return the folder of the repository."""
        return _folder(_tests(task), workdir)

    async def init(self, ctx: StageContext) -> None:
        """Put the repository into its place, and run the setup script.

        Raises:
            TaskInvalid: The job asks for another evaluation than one in a fresh sandbox.
            SetupFailed: The repository cannot be put there, or the hidden tests' diff does not apply to it.
        """
        tests = _tests(ctx.task)
        stage = ctx.spec.stages.eval
        if stage.sandbox == "shared" or (stage.carry is not None and stage.carry.files):
            raise TaskInvalid(
                "stages.eval: the handler 'swe' needs a fresh sandbox, and carries the repository's changes"
            )
        await _place_repository(ctx, tests, _folder(tests, ctx.workdir))
        await super().init(ctx)

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Apply what the policy handed in, add the hidden tests, and run them."""
        tests = _tests(ctx.task)
        folder = _folder(tests, ctx.workdir)
        if tests.submission == "answer":
            protected, most = protection(tests), tests.max_bytes
            refused = await apply_answer(ctx, folder, ctx.final_text, protected, most)
            if refused:
                log.info("%s: the diff of the answer is refused: %s", ctx.rollout, refused)
                ctx.show(f"The diff of the answer is refused: {refused}")
                return Evaluation(0.0, {"patch_applied": 0.0}, PATCH_REFUSED)
        if tests.patch is not None and not await applies(ctx, folder, tests.patch, env=ctx.eval_env):
            # Init has applied it to the repository as it was. What the policy did must be in its way.
            ctx.show("The patch of the hidden tests does not apply to what the policy left.")
            return Evaluation(0.0, {}, SABOTAGED)
        inside = ctx.sandbox.work_folder(folder)
        for path, text in tests.files.items():
            name = posixpath.normpath(path).encode("utf-8", "surrogateescape")
            await inside.put(name, text.encode(), mode=0o644)
        return await _tested(ctx, tests, folder)


async def _tested(ctx: StageContext, tests: SweTests, folder: str) -> Evaluation:
    assert ctx.place is not None
    env = {name: value for name, value in ctx.eval_env.items() if name != "PYTHONSAFEPATH"}
    if tests.verdict == "log":
        result = await _run(ctx, tests.script, folder, env)
        if result.timed_out:
            return Evaluation(0.0, {"test_timeout": 1.0}, TEST_TIMEOUT)
        if result.truncated_bytes:
            return Evaluation(0.0, {}, LOG_TOO_LONG)
        printed = result.text()
        results = parse(tests.log_parser, printed, tests.script)
        ctx.show(_LOG_WARNING)
        evaluation = _scored(ctx, tests, results)
        if exit_code(printed, tests.script, result.exit_code) != 0 and not results.failures():
            # The tests did not end, whatever was printed before.
            ctx.show(_NO_FAILURE)
            return Evaluation(0.0, {}, NO_RESULTS)
        return evaluation
    report_files = ReportFiles(ctx.sandbox, f"{ctx.place.folder}/report")
    await report_files.write(tests, folder)
    result = await _run(ctx, tests.script, folder, report_files.environment(env))
    if result.timed_out:
        return Evaluation(0.0, {"test_timeout": 1.0}, TEST_TIMEOUT)
    report = await report_files.read(tests.log_parser)
    if not report.complete:
        ctx.show(_NO_REPORT)
        return Evaluation(0.0, {}, NO_RESULTS)
    doubtful = sorted(report.doubtful(tests))
    if doubtful:
        ctx.show(f"These tests cannot be believed: {', '.join(map(one_line, doubtful[:_SHOWN]))}")
        return Evaluation(0.0, {}, TAMPERED)
    return _scored(ctx, tests, report.results)


async def _run(ctx: StageContext, script: str, folder: str, env: dict[str, str]) -> ExecResult:
    result = await ctx.sandbox.run(
        [*_SHELL, READ_AND_RUN, "bash"],
        env=env,
        clean_env=True,
        cwd=folder,
        stdin=script.encode(),
        timeout=ctx.timeout,
        max_output=_LOG_BYTES,
    )
    ctx.show(result.text().strip())
    return result


def _scored(ctx: StageContext, tests: SweTests, results: Results) -> Evaluation:
    """Return the evaluation of the results. People are shown which tests did not pass."""
    total = score(tests, results)
    ctx.show(total.message)
    components = {"fail_to_pass": total.fail_to_pass, "pass_to_pass": total.pass_to_pass}
    return Evaluation(float(total.solved), components, "" if results else NO_RESULTS)


def _tests(task: Task) -> SweTests:
    if task.swe is None:
        raise TaskInvalid(f"task '{task.id}': swe: required by the handler 'swe'")
    return task.swe


def _folder(tests: SweTests, workdir: str) -> str:
    return posixpath.normpath(posixpath.join(workdir, tests.repository.path))


_SECONDS: Final = 300.0
_FROM_FOLDER: Final = 'mkdir -p -- "$2" && cp -a -- "$1/." "$2"'
_FROM_ARCHIVE: Final = 'mkdir -p -- "$2" && tar -x --no-same-owner -f "$1" -C "$2"'
_FROM_EITHER: Final = f'if [ -d "$1" ]; then {_FROM_FOLDER}; else {_FROM_ARCHIVE}; fi'


def protection(tests: SweTests) -> Callable[[bytes], bool]:
    """Return whether changes of a path by the policy are dropped.

    They are, for the tests that decide and the folders of tests that they lie in, for what the task protects
    or hides, and for files that decide how tests are run. Each of these stays in the fresh sandbox as Init
    made it.
    """
    named = _test_paths(tests)
    named += _test_folders(named)
    paths = {path.encode("utf-8", "surrogateescape") for path in named}

    def protected(path: bytes) -> bool:
        parts = path.decode("utf-8", "surrogateescape").split("/")
        # Programs that read them may ignore the case of letters.
        small = [part.lower() for part in parts]
        if any(_matches(part, _PROTECTED_FOLDERS) for part in small) or _matches(small[-1], _PROTECTED_FILES):
            return True
        return any(path == folder or path.startswith(folder + b"/") for folder in paths)

    return protected


def _test_paths(tests: SweTests) -> list[str]:
    """Return the files and folders of the tests that decide, relative to the repository's folder."""
    named = [*tests.files, *tests.protected, *_inside(tests)]
    if tests.patch is not None:
        named += changed_files(tests.patch)
    deciding = [*tests.fail_to_pass, *tests.pass_to_pass, *(tests.expected or ())]
    named += [name.partition("::")[0] for name in deciding if "::" in name and in_a_function(name)]
    return sorted({posixpath.normpath(path) for path in named})


def _test_folders(paths: Iterable[str]) -> list[str]:
    """Return the folders of tests in which these files lie, because what tests share lies there, too."""
    folders = set()
    for path in paths:
        parts = path.split("/")[:-1]
        for depth, part in enumerate(parts):
            if _TEST_FOLDER.fullmatch(part) or (part == "testing" and depth == 0):
                folders.add("/".join(parts[: depth + 1]))
                break
    return sorted(folders)


def _inside(tests: SweTests) -> Iterable[str]:
    """Return the hidden paths of the repository's folder, relative to it."""
    folder = tests.repository.path.rstrip("/") + "/"
    for path in tests.repository.hidden:
        if path.startswith(folder):
            yield path[len(folder) :]
        elif not path.startswith("/"):
            yield path


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


async def _place_repository(ctx: StageContext, tests: SweTests, folder: str) -> None:
    """Make the repository's folder, apply the task's own diff, and remove what the policy must not see.

    In Eval's sandbox nothing is removed. There the hidden tests' diff is tried instead, while nothing of the
    policy's can be in its way.

    Raises:
        SetupFailed: One of these steps failed.
        TaskInvalid: The archive is not in base64.
        rollyard_sandbox.errors.SandboxError: The sandbox failed.
    """
    repository = tests.repository
    target = posixpath.join(ctx.workdir, repository.unpack) if repository.unpack is not None else folder
    if repository.archive is not None:
        try:
            data = base64.b64decode(repository.archive, validate=True)
        except (binascii.Error, ValueError) as error:
            raise TaskInvalid(f"task '{ctx.task.id}': swe.repository.archive: is not in base64") from error
        packed = f"{ctx.workdir}/.rollyard-archive"
        await ctx.sandbox.write_file(packed, data)
        await _bash(ctx, f'{_FROM_ARCHIVE} && rm -- "$1"', packed, target, field="archive")
    elif repository.source is not None:
        await _bash(ctx, _FROM_EITHER, repository.source, target, field="source")
    await _bash(ctx, '[ -d "$1" ] && [ ! -L "$1" ]', folder, field="path")
    if repository.patch is not None and not await applies(ctx, folder, repository.patch):
        raise SetupFailed(f"task '{ctx.task.id}': swe.repository.patch does not apply")
    if not ctx.for_eval:
        for path in repository.hidden:
            hidden = posixpath.join(folder, path)
            await _bash(ctx, 'rm -rf -- "$1" && [ ! -e "$1" ]', hidden, field="hidden")
    elif tests.patch is not None and not await applies(ctx, folder, tests.patch, "--check"):
        raise SetupFailed(f"task '{ctx.task.id}': swe.patch does not apply to the repository")


async def _bash(ctx: StageContext, script: str, *arguments: str, field: str) -> None:
    result = await ctx.sandbox.run(
        ["bash", "-c", script, "bash", *arguments], cwd="/", timeout=min(_SECONDS, ctx.timeout)
    )
    if result.exit_code != 0:
        how = "ran out of time" if result.timed_out else f"ended with {result.exit_code}"
        raise SetupFailed(
            f"task '{ctx.task.id}': swe.repository.{field}: the command {how}: {result.text()[-1000:]}"
        )


async def applies(
    ctx: StageContext, folder: str, patch: str, *options: str, env: Mapping[str, str] | None = None
) -> bool:
    """Apply a diff to the folder, with further options of `git apply`, and return whether that was possible.

    Raises:
        rollyard_sandbox.errors.SandboxError: The sandbox failed, or has no git.
    """
    return (await _git(ctx, folder, patch, options, env)).exit_code == 0


async def apply_answer(
    ctx: StageContext, folder: str, answer: str, protected: Callable[[bytes], bool], max_bytes: int
) -> str:
    """Apply the diff that an answer holds, and return why it is refused, or "".

    Changes of protected files are left out. What git says about the diff, and the folder before and
    afterwards, decide this. The text of the diff does not, because git has its own way of reading it.

    Raises:
        rollyard_sandbox.errors.SandboxError: The sandbox failed, or has no git.
    """
    # Reading a hostile answer may take a second, in which the worker has others to serve.
    patch = await asyncio.to_thread(patch_of, answer)
    if not patch.strip() or len(patch.encode(errors="replace")) > max_bytes:
        return "it is empty, or too long"
    listed = await _git(ctx, folder, patch, ("--numstat", "-z"), ctx.eval_env)
    if listed.exit_code != 0 or listed.truncated_bytes:
        return "it is not a diff"
    names = {record.split(b"\t", 2)[-1] for record in listed.output.split(b"\0") if record}
    if any(posixpath.normpath(name) != name or name.startswith((b"/", b"../")) for name in names):
        return "it has a path that could be written more shortly, or leads out of the folder"
    excluded = [f"--exclude={_literal(name)}" for name in sorted(names) if protected(name)]
    before = await ctx.sandbox.work_folder(folder).tree()
    if not await applies(ctx, folder, patch, *excluded, env=ctx.eval_env):
        return "it does not apply"
    after = await ctx.sandbox.work_folder(folder).tree()
    if any(
        entry != before.get(path) for path, entry in after.items() if entry.kind not in ("file", "folder")
    ):
        return "it makes links"
    if any(after.get(path) != before.get(path) for path in before.keys() | after.keys() if protected(path)):
        return "it moves, makes or changes a file that the policy cannot change"
    return ""


def patch_of(answer: str) -> str:
    """Return the diff in an answer, which ends with a newline.

    It is the whole answer if that begins as a diff does. Otherwise it is the last fenced block that looks
    like a diff, with headers of files and hunks, among those that are labelled as one, or else among all;
    together with the others, if no two of them change the same file. Otherwise it is the last block that is
    labelled as a diff, else the last one of all, else the whole answer.
    """
    begins = _DIFF.match(answer.lstrip("\n")) is not None
    blocks = [] if begins else [block for block in fenced_blocks(answer, _state) if block.text.strip()]
    labelled = [block for block in blocks if block.label in _LABELS]
    for those in (labelled, blocks):
        alike = [block.text for block in those if _DIFF.search(block.text)]
        if alike:
            return "".join(alike) if _apart(alike) else alike[-1]
    for candidates in (labelled, blocks):
        if candidates:
            return candidates[-1].text
    return answer if answer.endswith("\n") or not answer else f"{answer}\n"


def _apart(diffs: Sequence[str]) -> bool:
    """Return whether no two of several diffs change the same file."""
    changed: set[str] = set()
    for diff in diffs:
        sides = [name.partition("\t")[0].strip() for matches in _NAMES.findall(diff) for name in matches]
        names = {_SIDE.sub("", name, count=1) for name in sides if name and name != "/dev/null"}
        if not names or not names.isdisjoint(changed):
            return False
        changed |= names
    return True


def _state(block: Block) -> State:
    """Return whether a block was cut before its last hunk has all of its lines, as at a fence in Markdown."""
    if block.label and block.label not in _LABELS:
        return "whole"
    old = new = 0
    for line in block.text.removesuffix("\n").split("\n"):
        if old <= 0 and new <= 0:
            hunk = _HUNK.match(line)
            if hunk is not None:
                old, new = (int(count or 1) for count in hunk.groups())
        elif line.startswith((" ", "-", "+", "\\")) or not line:
            old -= line[:1] in " -"
            new -= line[:1] in " +"
        else:
            return "broken"
    return "cut" if old > 0 or new > 0 else "whole"


async def _git(
    ctx: StageContext, folder: str, patch: str, options: Sequence[str], env: Mapping[str, str] | None
) -> ExecResult:
    # A repository further up must not decide to what the paths of the diff are relative.
    variables = {**(env or {}), "GIT_CEILING_DIRECTORIES": posixpath.dirname(folder)}
    return await ctx.sandbox.run(
        [*_GIT, *options, "-"],
        env=variables,
        clean_env=env is not None,
        cwd=folder,
        stdin=patch.encode(errors="replace"),
        timeout=min(_APPLY_SECONDS, ctx.timeout),
        max_output=1 << 20,
    )


def _literal(name: bytes) -> str:
    return re.sub(r"([*?\[\]\\])", r"\\\1", name.decode("utf-8", "surrogateescape"))


@dataclass(slots=True)
class SignedReport:
    """What a report says.

    Attributes:
        results: The result of each test. It is MISSING for a case of a cut name that was found and not run.
        complete: Whether the report is genuine and has its last line.
        tampered: The tests that passed without running their own code to its end, and those in whose place
            a function that fails did not count as failed.
        controlled: The tests in whose place such a function counted as failed.
    """

    results: Results = field(default_factory=Results)
    complete: bool = False
    tampered: set[str] = field(default_factory=set)
    controlled: set[str] = field(default_factory=set)

    def doubtful(self, tests: SweTests) -> set[str]:
        """Return the tests of a task that have passed in a way that is not believed."""
        reported = Reported(tests, self.results.keys() | self.tampered)
        listed = [*tests.fail_to_pass, *tests.pass_to_pass, *(tests.expected or ())]
        doubted = {name for test in listed for name in reported.of(test) if name in self.tampered}
        for test in filter(in_a_function, deciding(tests)):
            passed = (name for name in reported.of(test) if self.results.get(name) == PASSED)
            doubted.update(name for name in passed if name not in self.controlled)
        return doubted


class ReportFiles:
    """The plugin, its secret and its report, in a folder of the sandbox that Run could not write to.

    Args:
        client: The sandbox.
        folder: The absolute path of the folder.
    """

    def __init__(self, client: ExecClient, folder: str) -> None:
        self._client = client
        self._folder = folder
        self._secret = secrets.token_hex(32)

    async def write(self, tests: SweTests, repository: str) -> None:
        """Write the plugin, and the secret with what it has to know of the tests.

        Args:
            tests: The hidden tests.
            repository: The absolute path of the repository's folder.

        Raises:
            rollyard_sandbox.errors.SandboxError: The sandbox failed.
        """
        names = sorted({plain(name) for name in deciding(tests) if in_a_function(name)})
        listed = (*tests.fail_to_pass, *tests.pass_to_pass)
        cut = sorted({plain(name) for name in listed if "[" in name and not name.endswith("]")})
        paths = _test_paths(tests)
        task = {
            "secret": self._secret,
            "folder": repository,
            "names": names,
            "cut": cut,
            "files": paths,
            "folders": _test_folders(paths),
        }
        for path, module in _SOURCES.items():
            source = files(__package__).joinpath(module).read_bytes()
            await self._client.write_file(f"{self._folder}/{path}", source)
        await self._client.write_file(f"{self._folder}/{SECRET}", json.dumps(task).encode(), mode=0o600)

    def environment(self, environment: dict[str, str]) -> dict[str, str]:
        """Return the variables that let Python begin with the plugin, and pytest load it."""
        added = {"PYTEST_ADDOPTS": f"-p {NAME}", "PYTHONPATH": self._folder}
        for name, separator in (("PYTEST_ADDOPTS", " "), ("PYTHONPATH", ":")):
            if environment.get(name):
                added[name] += separator + environment[name]
        return {**environment, **added}

    async def read(self, parser: str) -> SignedReport:
        """Return what the report says. Without a report it is empty, and not complete.

        Args:
            parser: The log parser, by whose rules tests are named.

        Raises:
            rollyard_sandbox.errors.SandboxError: The sandbox failed.
        """
        data, size = bytearray(), 1
        while len(data) < min(size, _MAX_BYTES):
            try:
                part = await self._client.read_file(
                    f"{self._folder}/{REPORT}", max_bytes=8 << 20, offset=len(data)
                )
            except FileError:
                return SignedReport()
            data += part.data
            size = part.size
            if not part.data:
                break
        return read_report(bytes(data), self._secret, parser)


def read_report(data: bytes, secret: str, parser: str) -> SignedReport:
    """Return what a report says, up to the first line that is not genuine."""
    report, last = SignedReport(), b""
    collected: set[str] = set()
    for line in data.split(b"\n")[:-1]:
        signature, _, text = line.partition(b" ")
        expected = sign(secret.encode(), last, text)
        if report.complete or not hmac.compare_digest(expected, signature):
            report.complete = False
            return report
        last = expected
        kind, digits, status = text.decode().split(" ")
        if kind == "end":
            report.complete = True
            for test in collected - report.results.keys() - report.tampered:
                report.results.add(test, MISSING)
            continue
        # Tests are named as data sets name them. No text of a test is read as a line of a log.
        test = logged_name(parser, bytes.fromhex(digits.strip("-")).decode(errors="surrogateescape"))
        if status == TAMPERED_STATUS:
            report.tampered.add(test)
        elif kind == "collected":
            collected.add(test)
        elif kind == "control":
            report.controlled.add(test)
        else:
            report.results.add(test, status)
    return report
