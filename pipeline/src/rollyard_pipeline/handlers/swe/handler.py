"""The handler `swe`: the policy changes a repository, and hidden tests run in a fresh sandbox."""

from __future__ import annotations

import base64
import binascii
import logging
import posixpath
from typing import Final

from rollyard_crds.fields.signals import SHIPPED
from rollyard_crds.fields.swe_tests import SweTests
from rollyard_crds.task import Task
from rollyard_process.log_text import one_line
from rollyard_sandbox.client import ExecResult

from rollyard_pipeline.errors import SetupFailed, TaskInvalid
from rollyard_pipeline.handlers.base import READ_AND_RUN, Evaluation, FolderChanges, Handler, StageContext
from rollyard_pipeline.handlers.swe import diffs
from rollyard_pipeline.handlers.swe.log_parsers import exit_code, parse
from rollyard_pipeline.handlers.swe.protected import protection
from rollyard_pipeline.handlers.swe.report import ReportFiles
from rollyard_pipeline.handlers.swe.results import Results, score
from rollyard_pipeline.sabotage import SABOTAGED, TEST_TIMEOUT

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
            refused = await diffs.apply_answer(ctx, folder, ctx.final_text, protected, most)
            if refused:
                log.info("%s: the diff of the answer is refused: %s", ctx.rollout, refused)
                ctx.show(f"The diff of the answer is refused: {refused}")
                return Evaluation(0.0, {"patch_applied": 0.0}, PATCH_REFUSED)
        if tests.patch is not None and not await diffs.applies(ctx, folder, tests.patch, env=ctx.eval_env):
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
    if repository.patch is not None and not await diffs.applies(ctx, folder, repository.patch):
        raise SetupFailed(f"task '{ctx.task.id}': swe.repository.patch does not apply")
    if not ctx.for_eval:
        for path in repository.hidden:
            hidden = posixpath.join(folder, path)
            await _bash(ctx, 'rm -rf -- "$1" && [ ! -e "$1" ]', hidden, field="hidden")
    elif tests.patch is not None and not await diffs.applies(ctx, folder, tests.patch, "--check"):
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
