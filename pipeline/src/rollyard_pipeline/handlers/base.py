"""The base class of handlers: three async methods, of which most handlers implement only one.

A handler serves many rollouts, so it keeps no state of one. Data that Init or Run pass to a later stage
belong in `ctx.carry`. The methods of handlers from other packages may block (see `handlers.isolated`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Literal, Protocol

from rollyard_crds.rolloutjob import EvalSandbox, RolloutJobSpec
from rollyard_crds.task import Message, Task, TaskSandbox
from rollyard_crds.trajectory import (
    MAX_REWARD,
    MAX_REWARD_OUTPUT,
    RunRecord,
    Thought,
    Trajectory,
    Transcript,
    Turn,
    final_text_of,
)
from rollyard_sandbox.client import EvalPlace, ExecClient, ExecResult
from rollyard_sandbox.errors import LaunchError

from rollyard_pipeline.chat.thoughts import text_thought
from rollyard_pipeline.errors import SetupFailed
from rollyard_pipeline.trajectories.sanitize import clean_text

# A script runs without a file: it needs no disk, and nothing in the sandbox can change it.
# The script comes on standard input and is read completely before any of it runs. None of its own commands
# can consume the rest. The variable is not exported.
READ_AND_RUN: Final = 'rollyard_script=$(cat) && exec < /dev/null && eval "$rollyard_script"'
# The answer comes first, up to a NUL, because it may be longer than a request's header.
_READ_ANSWER: Final = "IFS= read -r -d '' ROLLYARD_ANSWER && export ROLLYARD_ANSWER && "
# The shell reads no start-up file, and with -p neither BASH_ENV nor functions from the environment.
_TEST_SHELL: Final = ("bash", "--noprofile", "--norc", "-p", "-c", _READ_ANSWER + READ_AND_RUN, "bash")


async def run_test(
    client: ExecClient,
    script: str,
    *,
    env: Mapping[str, str],
    answer: str,
    timeout: float,
    max_output: int,
) -> ExecResult:
    """Run a hidden test in a fresh bash in the work folder.

    Args:
        env: The whole environment of the test, except ROLLYARD_ANSWER.
        answer: The value of ROLLYARD_ANSWER.

    Raises:
        rollyard_sandbox.errors.SandboxError: The test cannot be started, or the sandbox failed.
    """
    data = answer.replace("\0", "\ufffd").encode(errors="replace") + b"\0" + script.encode(errors="replace")
    return await client.run(
        list(_TEST_SHELL), env=dict(env), clean_env=True, stdin=data, timeout=timeout, max_output=max_output
    )


ANSWER: Final = "answer"
"""The key of `ctx.carry` under which Run stores the answer that `submit` received."""
_SETUP_OUTPUT: Final = 8192  # The number of bytes of a setup script's output that the error message keeps.


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A score.

    `reward` lies in the handler's `reward_range`; `components` are for people and reward shaping.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    """The record's `reward_reason`: one CamelCase word that explains a score which tests did not decide."""


@dataclass(frozen=True, slots=True)
class FolderChanges:
    """The changes of a folder that a handler wants in Eval's fresh sandbox."""

    folder: str
    """The absolute path of the folder. No part of it may be a symbolic link."""
    max_bytes: int
    """The limit of all changed files together, in bytes."""
    protected: Callable[[bytes], bool]
    """Whether the changes of a path, which is relative to the folder, are dropped."""


class AgentSteps(Protocol):
    """The job's agent, which plays a task of several steps in one episode."""

    async def step(self, task: Task, seconds: float | None) -> bool:
        """Play the agent for one step, and return whether a further step may follow.

        Args:
            task: The task with the solution of this step.
            seconds: The limit of this step in seconds, or None for that of the stage. A step that exceeds it
                truncates the episode.
        """
        ...

    def say(self, text: str) -> None:
        """Continue the episode with a user's message."""
        ...


@dataclass(slots=True)
class StageContext:
    """The data and operations that one stage of one rollout may use."""

    task: Task
    spec: RolloutJobSpec
    rollout: str
    sample_index: int
    timeout: float
    """The time that this stage may take, in seconds.

    In Eval this is the time for its tests, and the score may come a little later.
    """
    client: ExecClient | None = None
    """The sandbox, or None if neither the handler nor the agent needs one."""
    workdir: str = "/work"
    """The sandbox's work folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The variables of the job and the task."""
    carry: dict[str, Any] = field(default_factory=dict)
    """JSON data from the earlier stages, which the later stages receive (1 MiB at most)."""
    trajectory: Transcript | Trajectory | None = None
    """What Run recorded. It is set in Eval only, and has the token lists if the handler `needs_tokens`."""
    place: EvalPlace | None = None
    """Folders and a file that Run could not write to. It is set in Eval only, if `needs_sandbox` is true."""
    eval_env: Mapping[str, str] = field(default_factory=dict)
    """The environment of all programs that Eval starts in the sandbox. It is set in Eval only.

    See docs/handlers.md.
    """
    for_eval: bool = False
    """Whether Init prepares the fresh sandbox of Eval, which the policy never sees."""
    run_agent: Callable[[], Awaitable[None]] | None = None
    """Plays the job's agent. It is set in Run only."""
    agent_steps: AgentSteps | None = None
    """Plays the job's agent step by step, for handlers whose tasks have several. It is set in Run only."""
    purpose: Literal["rollout", "eval", "control"] = "rollout"
    """Why the sandbox exists: for the rollout; in `init`, for an Eval of its own; or as a control, which
    shows what the evaluation gives where no policy has been."""
    shown: str = ""
    """The end of what Eval printed, for people (see `show`)."""

    def show(self, text: str) -> None:
        """Add a text to what people see of this evaluation. Only the last 4,096 characters are kept.

        It becomes the record's `reward_output`, and has no effect on the reward.
        """
        # Cutting comes first, so that cleaning takes a bounded time.
        joined = "\n".join(part for part in (self.shown, text[-MAX_REWARD_OUTPUT:]) if part)
        self.shown = clean_text(joined[-MAX_REWARD_OUTPUT:])

    @property
    def sandbox(self) -> ExecClient:
        """Return the sandbox of a handler whose `needs_sandbox` is true."""
        if self.client is None:
            raise RuntimeError("the handler uses a sandbox but says needs_sandbox = False")
        return self.client

    async def run_test(self, script: str, *, max_output: int = 16_384) -> ExecResult:
        """Run a hidden bash script as the handler `shell` does, within `timeout`. This is for Eval only.

        The script gets `$ROLLYARD_ANSWER` and `$ROLLYARD_REWARD_FILE`, an empty file at `place.reward_file`.

        Raises:
            rollyard_sandbox.errors.SandboxError: The script cannot be started, or the sandbox failed.
        """
        if self.place is None:
            raise RuntimeError("run_test is for eval, of a handler that says needs_sandbox")
        env = {**self.eval_env, "ROLLYARD_REWARD_FILE": self.place.reward_file}
        result = await run_test(
            self.sandbox,
            script,
            env=env,
            answer=self.answer or "",
            timeout=self.timeout,
            max_output=max_output,
        )
        printed = result.text().strip()
        if not printed and result.exit_code != 0:
            printed = f"The test script printed nothing, and its exit status is {result.exit_code}."
        self.show(printed)
        return result

    @property
    def answer(self) -> str | None:
        """Return what the policy submitted, or None if it submitted nothing."""
        value = self.carry.get(ANSWER)
        return value if isinstance(value, str) else None

    @property
    def final_text(self) -> str:
        """Return the submitted answer, else the last message of the policy without its thought, else "".

        What `submit` received is an answer whatever it spells. A thought that is not closed leaves no answer.
        If the job's `agent.thoughts` is `answer`, all of the message is the answer.
        """
        return final_text_of(self.answer, *self._last)

    @property
    def thought(self) -> str:
        """Return the thought of the policy's last message, without marks such as `<think>`, else ""."""
        content, thought = self._last
        return "" if thought is None else content[thought.start : thought.end].strip()

    @property
    def _last(self) -> tuple[str, Thought | None]:
        """Return the content of the policy's last message, and which part of it is a thought."""
        messages = [] if self.trajectory is None else said_by_policy(self.task, self.trajectory)
        if not messages:
            return "", None
        message, turn = messages[-1]
        if self.spec.agent.thoughts == "answer":
            return message.content, None
        if turn is None:
            # Where no turn was recorded, as in `rollyard grade`, the text alone decides.
            return message.content, text_thought(message.content)
        return message.content, turn.thought


def said_by_policy(task: Task, trajectory: RunRecord) -> list[tuple[Message, Turn | None]]:
    """Return the policy's messages with their turns, without the messages that the task begins with."""
    initial = sum(message.role == "assistant" for message in task.chat())
    turn_numbers = trajectory.said
    own = [index for index, message in enumerate(trajectory.messages) if message.role == "assistant"][
        initial:
    ]
    return [
        (trajectory.messages[index], trajectory.turns[turn_numbers[index]] if index in turn_numbers else None)
        for index in own
    ]


def check_setup(task: Task, script: str, result: ExecResult) -> None:
    """Check that a script which prepares a task has done so.

    Raises:
        SetupFailed: It did not exit with 0.
    """
    if result.timed_out or result.exit_code != 0:
        how = "ran out of time" if result.timed_out else f"exited with {result.exit_code}"
        raise SetupFailed(f"task '{task.id}': {script} {how}: {result.text().strip()[-1000:]}")


class Handler(ABC):
    """The base of handlers.

    Implement `eval` and name the class in the entry point group `rollyard.handlers`.
    """

    needs_sandbox: ClassVar[bool] = True
    """Whether the handler needs a sandbox.

    If it does not, a sandbox is started only if the agent's tools need one, and Eval does not prepare it.
    """
    sandbox_before_eval: ClassVar[bool] = True
    """Whether Init and Run have the sandbox that the handler needs.

    If not, a sandbox is started there only if the agent's tools need one. Otherwise Eval gets a fresh one, in
    which `init` runs first.
    """
    needs_tokens: ClassVar[bool] = False
    """Whether `eval` reads the token lists of a trajectory, which are `ctx.trajectory.segments`.

    If it does not, `ctx.trajectory` has messages, turns and the numbers of tokens, and the lists stay in the
    control plane. An `eval` that reads them nevertheless fails with TokensMissing.
    """
    judges_answers: ClassVar[bool] = False
    """Whether there are tasks for which `eval` judges the answer and no files; see `judges_answer`."""
    reward_range: ClassVar[tuple[float, float]] = (-MAX_REWARD, MAX_REWARD)
    """The smallest and the largest reward that `eval` returns. Any other reward is refused."""
    fetches: ClassVar[bool] = False
    """Whether `eval` runs tests that may have the network of `stages.eval.network`."""
    components: ClassVar[tuple[str, ...]] = ()
    """The names of all components that `eval` may return and a job may give a weight.

    A component that `eval` leaves out counts as 0.
    """
    eval_sandbox: ClassVar[EvalSandbox] = "shared"
    """The sandbox in which `eval` works if the job's `stages.eval` does not specify one.

    It is either Run's own sandbox or a fresh one. In a fresh one, `init` has run again, and nothing of Run's
    is copied into it except what `stages.eval.carry` names.
    """

    def dockerfile(self, task: Task, image: str) -> Mapping[str, tuple[bytes, int]] | None:
        """Return the folder of the Dockerfile from which an image that the task names can be built.

        It has the content and mode of each file by path. It is None for an image not built from the task.
        """
        return None

    def eval_apart(self, task: Task) -> TaskSandbox | None:
        """Return the sandbox of a task whose Eval always has one of its own, whatever the job says.

        It is None for a task whose Eval works in the sandbox that the job chooses.
        """
        return None

    def eval_hosts(self, task: Task) -> Sequence[str] | None:
        """Return those hosts of `stages.eval.allowedHosts` that the tests of a task may reach.

        It is None for all of them.
        """
        return None

    def artifacts(self, task: Task) -> Sequence[str]:
        """Return absolute paths of files and folders that a fresh sandbox of Eval gets, besides `changes`.

        By default there are none. Links and special files are left out, as are paths at which Run has left
        nothing.
        """
        return ()

    def for_task(self, task: Task) -> Handler:
        """Return the handler that prepares, plays and scores this task; by default, this one.

        A handler of several kinds of tasks returns one that it owns and closes. The same task must always
        get the same handler, since the stages of a rollout may run in different processes. The job's `reward`
        knows the components of this handler.
        """
        return self

    def check(self, task: Task) -> list[str]:
        """Return the problems of a task, one line for each. A line begins with the name of the field."""
        return []

    def judges_answer(self, task: Task) -> bool:
        """Return whether `eval` uses only the answer and the messages of Run, such as a program in them.

        A kept trajectory can then be evaluated again, in a sandbox in which only `init` has run. What the
        answer does in a fresh sandbox of Eval is the policy's doing.
        """
        return self.judges_answers

    def changes(self, task: Task, workdir: str) -> FolderChanges | None:
        """Return the folder whose changes by the policy a fresh sandbox of Eval gets; by default, none.

        Args:
            task: The task.
            workdir: The sandbox's work folder.
        """
        return None

    def folder(self, task: Task, workdir: str) -> str:
        """Return the folder in which the policy and the tests work; by default, the sandbox's work folder.

        In Eval, git repositories below it have the settings that Init gave them.
        """
        return workdir

    async def init(self, ctx: StageContext) -> None:
        """Prepare the sandbox, which already has its files and variables. By default, run the setup script.

        Raises:
            SetupFailed: The script did not exit with 0.
        """
        script = ctx.task.sandbox.setup
        if script is None or ctx.client is None:
            return
        run = partial(
            ctx.client.run,
            ["bash", "-c", READ_AND_RUN, "bash"],
            env=dict(ctx.env),
            stdin=script.encode(errors="replace"),
            timeout=ctx.timeout,
            max_output=_SETUP_OUTPUT,
        )
        try:
            result = await run()
        except LaunchError:  # The work folder is gone, for example.
            result = await run(cwd="/")
        check_setup(ctx.task, "sandbox.setup", result)

    async def run(self, ctx: StageContext) -> None:
        """Play the episode. By default, run the job's agent."""
        if ctx.run_agent is not None:
            await ctx.run_agent()

    @abstractmethod
    async def eval(self, ctx: StageContext) -> Evaluation:
        """Return the score of the episode. An exception is an infrastructure failure and gives no reward.

        If the policy's work makes tests slow or breaks them, that is the policy's fault and must be scored.
        An error of the sandbox that the policy can have caused (`rollyard_pipeline.sabotage`) scores 0 if it
        is not caught.
        """

    async def close(self) -> None:  # noqa: B027 - most handlers hold nothing
        """Release what the handler holds (child processes, connections).

        This is called when the worker stops, in the worker. Processes in which calls ran end without it.
        """
