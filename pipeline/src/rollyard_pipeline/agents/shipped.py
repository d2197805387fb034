"""The agents that come with Rollyard: `tools`, `single_turn` and `oracle`."""

from __future__ import annotations

from rollyard_pipeline.agents.base import Agent, AgentContext
from rollyard_pipeline.errors import TaskInvalid
from rollyard_pipeline.tool_parsers.base import ParsedCall


class ToolsAgent(Agent):
    """Samples turns, runs the calls and returns the results until the policy is done.

    It ends the episode on `submit`, on a turn without tool calls, or, truncated, at a limit.
    """

    async def run(self, ctx: AgentContext) -> None:
        """Sample turns and run their calls until the episode has ended."""
        while not ctx.finished:
            turn = await ctx.turn()
            if turn is None or ctx.finished:
                return
            if not turn.calls:
                ctx.finish()
                return
            await ctx.call_all(turn.calls)


class SingleTurnAgent(Agent):
    """Samples one turn and offers no tools."""

    uses_tools = False

    async def run(self, ctx: AgentContext) -> None:
        """Sample the one turn."""
        await ctx.turn()


class OracleAgent(Agent):
    """Runs `task.solution` through the tools that a policy would use, which proves an evaluation correct.

    It asks no model.
    """

    uses_model = False

    async def run(self, ctx: AgentContext) -> None:
        """Replay `task.solution` step by step until it ends the episode.

        Raises:
            TaskInvalid: The task has no solution.
        """
        if not ctx.task.solution:
            raise TaskInvalid(f"task '{ctx.task.id}' has no 'solution', which the agent 'oracle' replays")
        for step in ctx.task.solution:
            await ctx.replay(ParsedCall(step.name, step.arguments))
            if ctx.finished:
                return
