"""One evaluation: its environment, whose fault an error is, and the range of rewards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import rollyard_sandbox.errors as exec_errors
from rollyard_crds.lease import LeaseRef
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_pipeline import sabotage
from rollyard_pipeline.agents import AgentContext
from rollyard_pipeline.errors import EvalTimeout, PermanentFailure
from rollyard_pipeline.handlers import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.environment import SYSTEM_PATH, evaluation_environment
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.stages.evaluation import evaluate
from rollyard_pipeline.tool_parsers.base import ParsedCall
from rollyard_pipeline.tool_parsers.json_calls import HermesParser
from rollyard_pipeline.tools.base import ToolContext
from rollyard_pipeline.tools.shipped import BashTool
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_sandbox.client import EvalPlace, ExecClient
from rollyard_testing.pace import patience

PLACE = EvalPlace("/p", "/p/home", "/p/tmp", "/p/reward", (), {})
Score = Callable[[StageContext], Awaitable[Evaluation]]


def environment(author: dict[str, str] | None = None, **variables: str) -> dict[str, str]:
    given = {"HOME": "/work", "TMPDIR": "/tmp", **variables, **(author or {})}
    return evaluation_environment(given, PLACE, workdir="/work", author=author or {})


def test_home_and_tmp_are_the_places() -> None:
    found = environment()
    assert (found["HOME"], found["TMPDIR"], found["PATH"]) == ("/p/home", "/p/tmp", SYSTEM_PATH)


def test_folders_of_run_are_left_out_of_lists() -> None:
    found = environment(
        PATH="/work/bin:/opt/conda/bin:.::bin:/tmp/x:/workshop/bin:/opt/../work/bin:/usr/bin",
        PYTHONPATH="/work:/opt/lib",
        LD_PRELOAD="/work/a.so /usr/lib/jemalloc.so",
        PERL5LIB="/work/lib",
        BASH_ENV="env.sh",
    )
    assert found["PATH"] == "/opt/conda/bin:/workshop/bin:/usr/bin"
    assert (found["PYTHONPATH"], found["LD_PRELOAD"]) == ("/opt/lib", "/usr/lib/jemalloc.so")
    assert not {"PERL5LIB", "BASH_ENV"} & found.keys()


def test_options_that_name_a_folder_of_run_are_left_out() -> None:
    found = environment(
        NODE_OPTIONS="--require /work/x.js",
        JAVA_TOOL_OPTIONS="-Xmx1g",
        **{"BASH_FUNC_ls%%": "() { :; }", "SHELLOPTS": "xtrace"},
    )
    assert found["JAVA_TOOL_OPTIONS"] == "-Xmx1g"
    assert not {"NODE_OPTIONS", "BASH_FUNC_ls%%", "SHELLOPTS"} & found.keys()


def test_what_the_author_says_stays() -> None:
    author = {"EXPECTED": "/work/expected.txt", "PYTHONSAFEPATH": "", "LANG": "de_DE.UTF-8", "HOME": "/x"}
    found = environment(author)
    assert found["EXPECTED"] == "/work/expected.txt"
    assert (found["PYTHONSAFEPATH"], found["LANG"]) == ("", "de_DE.UTF-8")
    assert found["HOME"] == "/p/home"
    assert environment()["PYTHONSAFEPATH"] == "1"


FOLDERS = (
    "BASH_ENV", "CARGO_HOME", "CDPATH", "CLASSPATH", "ENV", "GEM_HOME", "GEM_PATH", "GIT_CONFIG",
    "GIT_CONFIG_SYSTEM", "GIT_DIR", "GIT_EXEC_PATH", "GIT_TEMPLATE_DIR", "GOPATH", "INPUTRC", "IPYTHONDIR",
    "JUPYTER_CONFIG_DIR", "LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "LUA_CPATH", "LUA_PATH", "NODE_PATH",
    "NPM_CONFIG_PREFIX", "NPM_CONFIG_USERCONFIG", "PERL5LIB", "PERLLIB", "PYENV_ROOT", "PYTHONHOME",
    "PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONSTARTUP", "PYTHONUSERBASE", "RUBYLIB", "RUSTUP_HOME", "TEMP",
    "TMP", "VIRTUAL_ENV", "XDG_CACHE_HOME", "XDG_CONFIG_DIRS", "XDG_CONFIG_HOME", "XDG_DATA_DIRS",
    "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "npm_config_prefix", "npm_config_userconfig",
)  # fmt: skip
OPTIONS = (
    "EDITOR", "GIT_ASKPASS", "GIT_EDITOR", "GIT_EXTERNAL_DIFF", "GIT_SSH", "GIT_SSH_COMMAND",
    "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "LESSOPEN", "MAKEFLAGS", "NODE_OPTIONS", "PERL5OPT",
    "PROMPT_COMMAND", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "RUBYOPT", "SHELL", "SSH_ASKPASS", "VISUAL",
)  # fmt: skip


def test_every_variable_that_can_name_code_of_run_is_looked_at() -> None:
    """So it is for each folder that Run can write to: its work folder, home, TMPDIR, and those of all."""
    for written in ("/w", "/home/me", "/scratch", "/tmp", "/var/tmp", "/dev/shm", "/run/user"):
        given = {"HOME": "/home/me/", "TMPDIR": "/scratch"}
        given |= dict.fromkeys(FOLDERS, f"{written}:/opt/lib {written}/x")
        given |= dict.fromkeys(OPTIONS, f"--with {written}/x")
        found = evaluation_environment(given, PLACE, workdir="/w", author={})
        assert {name: found.get(name) for name in FOLDERS} == dict.fromkeys(FOLDERS, "/opt/lib")
        assert not set(OPTIONS) & found.keys()
    kept = environment(**dict.fromkeys((*FOLDERS, *OPTIONS), "/opt/x"))
    assert {name: kept.get(name) for name in (*FOLDERS, *OPTIONS)} == dict.fromkeys(
        (*FOLDERS, *OPTIONS), "/opt/x"
    )


def test_shells_and_git_bring_nothing_of_their_own() -> None:
    names = ("BASHOPTS", "OLDPWD", "PWD", "SHELLOPTS", "SHLVL", "_", "GIT_CONFIG_KEY_9", "GIT_CONFIG_VALUE_9")
    found = environment(**dict.fromkeys((*names, "BASH_FUNC_x%%"), "x"))
    assert not {*names, "BASH_FUNC_x%%"} & found.keys()
    count = int(found["GIT_CONFIG_COUNT"])
    settings = [(found[f"GIT_CONFIG_KEY_{n}"], found[f"GIT_CONFIG_VALUE_{n}"]) for n in range(count)]
    # Nothing else, because a test's own repositories are subject to it, too.
    assert settings == [("safe.directory", "*")]
    assert (found["GIT_CONFIG_NOSYSTEM"], found["GIT_PAGER"], found["PAGER"]) == ("1", "cat", "cat")


def test_an_evaluation_has_a_proxy_only_of_its_author() -> None:
    names = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    given = dict.fromkeys(names, "http://127.0.0.1:1")
    assert not set(names) & environment(**given).keys()
    for name in names:
        found = environment({name: "http://author"}, **{key: "x" for key in names if key != name})
        assert {key: found[key] for key in set(names) & found.keys()} == {name: "http://author"}


def test_settings_of_users_are_not_read() -> None:
    author = {"PIP_CONFIG_FILE": "/work/pip.conf", "GIT_CONFIG_GLOBAL": "/work/gitconfig"}
    found = environment(author, XDG_CONFIG_HOME="/work/.config", NPM_CONFIG_USERCONFIG="/work/.npmrc")
    assert found["PIP_CONFIG_FILE"] == "/dev/null"
    assert found["PYTHONNOUSERSITE"] == "1"
    assert not {"GIT_CONFIG_GLOBAL", "XDG_CONFIG_HOME", "NPM_CONFIG_USERCONFIG"} & found.keys()


def test_a_home_at_the_root_takes_nothing_away() -> None:
    assert environment(HOME="/", PATH="/usr/bin")["PATH"] == "/usr/bin"


@pytest.mark.attack(
    "an error that no table judges buys a new try",
    boundary="evaluation",
    surface="errors of an evaluation",
    stopped_by="one table judges every reason of the exec server",
)
def test_the_table_knows_every_error_of_the_exec_server() -> None:
    """A new reason must be judged: who gains by it?"""
    assert set(exec_errors._CLASSES) | {"SandboxError", "ProcessesSurvive"} <= sabotage.judged()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (exec_errors.SandboxSabotaged("full"), "SandboxSabotaged"),
        (exec_errors.FileError("x", reason="PermissionDenied"), "SandboxSabotaged"),
        (exec_errors.FileError("x", reason="DiskFull"), "SandboxSabotaged"),
        (exec_errors.LaunchError("x", reason="ResourceExhausted"), "SandboxSabotaged"),
        (exec_errors.LaunchError("x"), "SandboxSabotaged"),
        (exec_errors.CommandTooLarge("x"), "SandboxSabotaged"),
        (exec_errors.ConnectionLost("x"), ""),
        (exec_errors.LaunchError("x", reason="ProgramNotFound"), ""),
        (exec_errors.SandboxError("x", reason="OfANewerServer"), ""),
        (OSError("x"), ""),
    ],
)
def test_whose_failing_an_error_is(error: Exception, reason: str) -> None:
    assert sabotage.reward_reason(error) == reason


def test_what_a_sandbox_contains_is_the_policys() -> None:
    policys = {
        "SandboxSabotaged", "ProcessesSurvive", "FileError", "FileNotFound", "FileTooLarge",
        "InputOutputError", "IsADirectory", "NameTooLong", "NotADirectory", "NotAFile", "NotEmpty",
        "PermissionDenied", "ReadOnly", "SymlinkLoop", "TooManyEntries", "WouldBlock", "DiskFull",
        "ResourceExhausted", "LaunchFailed", "CommandTooLarge", "ServerFault",
    }  # fmt: skip
    found = {
        reason
        for reason in sabotage.judged()
        if sabotage.reward_reason(exec_errors.SandboxError("x", reason=reason))
    }
    assert found == policys


class Scored(Handler):
    """A handler that scores as the test asks."""

    def __init__(self, score: Score) -> None:
        self.score = score

    async def eval(self, ctx: StageContext) -> Evaluation:
        return await self.score(ctx)


class Ranged(Scored):
    needs_sandbox = False
    reward_range = (0.0, 1.0)


SPEC = RolloutJobSpec.model_validate(
    {"tasks": {"stream": True}, "handler": "mine", "agent": {"type": "oracle"}}
)


def context(client: ExecClient | None = None, workdir: str = "/work") -> StageContext:
    return StageContext(
        task=Task(id="t", prompt="q"), spec=SPEC, rollout="r", sample_index=0, timeout=5.0, client=client,
        workdir=workdir,
    )  # fmt: skip


@pytest.mark.attack(
    "a handler's reward leaves its range",
    boundary="evaluation",
    surface="rewards",
    stopped_by="`reward_range`, checked by the worker",
)
@pytest.mark.parametrize(
    ("evaluation", "words"),
    [
        (Evaluation(1.5), r"handler 'mine': reward 1\.5 is not in reward_range, 0 to 1"),
        (Evaluation(-0.001), "not in reward_range"),
        (Evaluation(1.001), "not in reward_range"),
        (Evaluation(0.0, {"good": 0.0, "style": True}), "style is True, expected a finite number"),
        (Evaluation(0.0, {"style": 1_000_001}), "expected at most 1,000,000 in size"),
        (Evaluation(math.nan), "reward is nan, expected a finite number"),
        (Evaluation(1.0, {"style": math.inf}), "style is inf, expected a finite number"),
        (Evaluation(1.0, {"style": -2e6}), r"style is -2000000\.0, expected at most 1,000,000 in size"),
        (Evaluation(True), "expected a finite number"),
        (Evaluation(0.0, {}, "not one word"), "expected one CamelCase word"),
    ],
)
async def test_rewards_are_in_range(evaluation: Evaluation, words: str) -> None:
    async def score(ctx: StageContext) -> Evaluation:
        return evaluation

    with pytest.raises(PermanentFailure, match=words):
        await evaluate(Ranged(score), context(), 5.0)


async def test_a_handler_that_names_no_range_may_punish() -> None:
    async def score(ctx: StageContext) -> Evaluation:
        return Evaluation(-1.0, {"penalty": -250.0})

    assert (await evaluate(Scored(score), context(), 5.0)).reward == -1.0


@pytest.mark.parametrize(
    "evaluation", [Evaluation(0), Evaluation(1.0, {"a": -1e6, "b": 1_000_000}, "TestTimeout")]
)
async def test_the_ends_of_a_range_belong_to_it(evaluation: Evaluation) -> None:
    async def score(ctx: StageContext) -> Evaluation:
        return evaluation

    assert await evaluate(Ranged(score), context(), 5.0) is evaluation


@pytest.fixture
async def sandbox(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[ExecClient, str]]:
    provider = open_provider("process", run_dir=tmp_path_factory.mktemp("e"), node="n")
    await provider.start()
    request = SandboxRequest(env={"OF_THE_JOB": "1", "PATH": "/usr/bin:/bin"})
    sandbox = await provider.acquire(request, LeaseRef(rollout="r", token=1))
    try:
        yield sandbox.client, sandbox.workdir
    finally:
        await sandbox.close()
        await provider.release(sandbox.handle)
        await provider.aclose()


async def test_whatever_a_handler_starts_has_the_environment_of_eval(sandbox: tuple[ExecClient, str]) -> None:
    client, workdir = sandbox
    await client.set_env({"BASH_ENV": f"{workdir}/env.sh"})
    shown = 'echo "$HOME $OF_THE_JOB $PYTHONNOUSERSITE [$BASH_ENV]"'

    async def score(ctx: StageContext) -> Evaluation:
        expected = f"{ctx.place.home} 1 1 []\n"
        assert (await ctx.sandbox.run(["bash", "-c", shown])).text() == expected
        assert (await ctx.sandbox.bash(shown)).text() == expected
        assert (await ctx.run_test(shown)).text() == expected
        return Evaluation(1.0)

    for _ in range(2):  # Another worker does it after the first one was lost.
        assert (await evaluate(Scored(score), context(client, workdir), 20.0)).reward == 1.0


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("echo one; echo two >&2; false", "one\ntwo"), ("true", ""),
        ("exit 3", "The test script printed nothing, and its exit status is 3."),
    ],
)  # fmt: skip
async def test_people_are_shown_what_a_test_printed(
    sandbox: tuple[ExecClient, str], script: str, shown: str
) -> None:
    async def score(ctx: StageContext) -> Evaluation:
        await ctx.run_test(script)
        return Evaluation(0.0)

    found = context(*sandbox)
    await evaluate(Scored(score), found, 20.0)
    assert found.shown == shown


async def test_a_file_that_the_policy_did_not_leave_is_its_failing(sandbox: tuple[ExecClient, str]) -> None:
    async def score(ctx: StageContext) -> Evaluation:
        await ctx.sandbox.read_file("result.txt")
        raise AssertionError("there is no such file")

    seen = context(*sandbox)
    found = await evaluate(Scored(score), seen, 20.0)
    assert (found.reward, found.reason) == (0.0, "SandboxSabotaged")
    assert "result.txt" in seen.shown


async def test_a_program_that_no_image_has_is_not_the_policys_failing(
    sandbox: tuple[ExecClient, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def score(ctx: StageContext) -> Evaluation:
        await ctx.sandbox.run(["no-such-program"])
        raise AssertionError("there is no such program")

    # Bare processes may see a system that they can write to: there it is the policy's.
    async def removed(client: ExecClient, error: exec_errors.SandboxError) -> bool:
        return False

    monkeypatch.setattr("rollyard_pipeline.sabotage.was_removed", removed)
    with pytest.raises(exec_errors.LaunchError) as caught:
        await evaluate(Scored(score), context(*sandbox), 20.0)
    assert caught.value.reason == "ProgramNotFound"


class Emptied:
    """A client of a sandbox in which no program is left, and whose folders may be written to."""

    def __init__(self, *, writable: bool) -> None:
        self.writable = writable
        self.written: list[str] = []

    async def run(self, argv: list[str], **options: Any) -> None:
        raise exec_errors.LaunchError(f"there is no {argv[0]}", reason="ProgramNotFound")

    async def bash(self, command: str, **options: Any) -> None:
        await self.run(["bash"])

    async def write_file(self, path: str, data: bytes) -> None:
        if not self.writable:
            raise exec_errors.FileError(path, reason="ReadOnly")
        self.written.append(path)

    async def remove(self, path: str) -> None:
        self.written.remove(path)


@pytest.mark.parametrize("writable", [True, False])
async def test_a_policy_that_removes_every_program_gets_no_new_try(writable: bool) -> None:
    """A missing shell is an observation in Run, and a score of 0 in Eval, unless the image has none."""
    client: Any = Emptied(writable=writable)
    error = exec_errors.LaunchError("there is no bash", reason="ProgramNotFound")
    assert await sabotage.was_removed(client, error) is writable
    assert client.written == []
    agent = AgentContext(
        task=Task(id="t", prompt="q"), spec=SPEC.agent, sampling=SPEC.sampling, episode=Episode(messages=[]),
        tools={"bash": BashTool()}, tool_context=ToolContext(client, 5.0, 100), parser=HermesParser(),
        session=None,
    )  # fmt: skip
    call = ParsedCall("bash", {"command": "ls"})
    if not writable:
        with pytest.raises(exec_errors.LaunchError):
            await agent.call(call)
        return
    assert (await agent.call(call)).error == "there is no bash"


async def test_time_that_went_to_the_sandbox_is_the_policys(sandbox: tuple[ExecClient, str]) -> None:
    async def score(ctx: StageContext) -> Evaluation:
        await ctx.sandbox.run(["sleep", "60"])
        raise AssertionError("it slept")

    found = await evaluate(Scored(score), context(*sandbox), 1.5)
    assert (found.reward, found.components, found.reason) == (0.0, {"test_timeout": 1.0}, "TestTimeout")


async def test_time_that_went_elsewhere_is_not(sandbox: tuple[ExecClient, str]) -> None:
    async def score(ctx: StageContext) -> Evaluation:
        await asyncio.sleep(60)
        raise AssertionError("it slept")

    with pytest.raises(EvalTimeout):
        await evaluate(Scored(score), context(*sandbox), 1.5)


async def test_a_handler_without_a_sandbox_does_not_touch_the_tools_own(
    sandbox: tuple[ExecClient, str],
) -> None:
    client, workdir = sandbox
    command = await client.start("echo on; sleep 60", timeout=patience(90))
    await command.wait_for_output(b"on")
    running = asyncio.create_task(command.result())

    async def score(ctx: StageContext) -> Evaluation:
        assert not running.done()
        assert ctx.place is None
        return Evaluation(1.0)

    assert (await evaluate(Ranged(score), context(client, workdir), 5.0)).reward == 1.0
    assert not running.done()
    await client.kill_all()
    await running
