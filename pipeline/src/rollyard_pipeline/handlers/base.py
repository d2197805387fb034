"""What a handler is: three async methods, of which most handlers write one.

A handler is made once per worker and serves all its rollouts: it keeps no state of a
rollout. What Init or Run want to tell a later stage goes into `ctx.carry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rollyard_crds.rolloutjob import EvalSandbox, RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_crds.trajectory import MAX_REWARD, Trajectory
from rollyard_sandbox.client import EvalPlace, ExecClient, ExecResult

from rollyard_pipeline.errors import SetupFailed
from rollyard_pipeline.handlers.scripts import run_script, run_test

ANSWER = "answer"
"""The key of `ctx.carry` under which Run leaves what `submit` handed in."""
_SETUP_OUTPUT = 8192  # bytes kept of a setup script's output, for the error message


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A score: `reward` within the handler's `reward_range`; `components` for people and reward shaping."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why, in one CamelCase word, where the tests could not simply decide: the record's `reward_reason`."""


@dataclass(slots=True)
class StageContext:
    """What one stage of one rollout may use."""

    task: Task
    spec: RolloutJobSpec
    rollout: str
    sample_index: int
    timeout: float
    """Seconds that this stage may work. Eval: what its tests may take; a score may come a little later."""
    client: ExecClient | None = None
    """The sandbox; None where neither handler nor agent needs one."""
    workdir: str = "/work"
    """The sandbox's work folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The variables of the job and the task."""
    carry: dict[str, Any] = field(default_factory=dict)
    """JSON; what the stages before left, and what the ones after will get (1 MiB at most)."""
    trajectory: Trajectory | None = None
    """Eval only: what Run recorded."""
    place: EvalPlace | None = None
    """Eval only, of a handler that says `needs_sandbox`: folders and a file that Run could not write to."""
    eval_env: Mapping[str, str] = field(default_factory=dict)
    """Eval only: the environment of whatever is started in the sandbox. See docs/handlers.md."""
    run_agent: Callable[[], Awaitable[None]] | None = None
    """Run only: plays the job's agent."""

    @property
    def sandbox(self) -> ExecClient:
        """The sandbox of a handler that says `needs_sandbox`."""
        if self.client is None:
            raise RuntimeError("the handler uses a sandbox but says needs_sandbox = False")
        return self.client

    async def run_test(self, script: str, *, max_output: int = 16_384) -> ExecResult:
        """Eval only: run a hidden bash script as the handler `shell` does, within `timeout`.

        It gets `$ROLLYARD_ANSWER` and `$ROLLYARD_REWARD_FILE`, an empty file at `place.reward_file`.

        Raises:
            rollyard_sandbox.errors.SandboxError: it cannot be started, or the sandbox failed.
        """
        if self.place is None:
            raise RuntimeError("run_test is for eval, of a handler that says needs_sandbox")
        env = {**self.eval_env, "ROLLYARD_REWARD_FILE": self.place.reward_file}
        return await run_test(
            self.sandbox,
            script,
            env=env,
            answer=self.answer or "",
            timeout=self.timeout,
            max_output=max_output,
        )

    @property
    def answer(self) -> str | None:
        """What the policy submitted; None if it did not."""
        value = self.carry.get(ANSWER)
        return value if isinstance(value, str) else None

    @property
    def final_text(self) -> str:
        """The submitted answer, else the last assistant message; empty if there is neither."""
        if self.answer is not None:
            return self.answer
        for message in reversed(self.trajectory.messages if self.trajectory else ()):
            if message.role == "assistant":
                return message.content
        return ""


class Handler(ABC):
    """Subclass, write `eval`, and name the class in the entry point group `rollyard.handlers`."""

    needs_sandbox: ClassVar[bool] = True
    """False: a sandbox is started only if the agent's tools need one, and Eval does not prepare it."""
    reward_range: ClassVar[tuple[float, float]] = (-MAX_REWARD, MAX_REWARD)
    """Least and largest reward that `eval` gives; another one is refused."""
    eval_sandbox: ClassVar[EvalSandbox] = "shared"
    """Where `eval` works if the job's `stages.eval` does not say: in Run's own sandbox, or in a fresh one, in
    which `init` has run again and into which nothing of Run's comes but what `stages.eval.carry` names."""

    def check(self, task: Task) -> list[str]:
        """What is wrong with a task, one line per problem, each beginning with the field's name."""
        return []

    async def init(self, ctx: StageContext) -> None:
        """Prepare the sandbox, whose files and variables are in place. Default: the task's setup script.

        Raises:
            SetupFailed: the script did not exit with 0.
        """
        script = ctx.task.sandbox.setup
        if script is None or ctx.client is None:
            return
        result = await run_script(
            ctx.client, script, env=ctx.env, timeout=ctx.timeout, max_output=_SETUP_OUTPUT
        )
        if result.timed_out or result.exit_code != 0:
            how = "ran out of time" if result.timed_out else f"exited with {result.exit_code}"
            raise SetupFailed(f"task '{ctx.task.id}': sandbox.setup {how}: {result.text()[-1000:]}")

    async def run(self, ctx: StageContext) -> None:
        """Play the episode. Default: the job's agent."""
        if ctx.run_agent is not None:
            await ctx.run_agent()

    @abstractmethod
    async def eval(self, ctx: StageContext) -> Evaluation:
        """Score the episode. Only this gives a reward; an exception is an infrastructure failure.

        Tests that the policy's work makes slow or break are the policy's failing: score them. An error of the
        sandbox that the policy can have caused (`rollyard_pipeline.sabotage`) scores 0 if it is not caught.
        """

    async def close(self) -> None:  # noqa: B027 - most handlers hold nothing
        """Let go of what the handler holds (child processes, connections); the worker stops."""
