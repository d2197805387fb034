"""The agent `oracle` replays a task's reference solution, which proves that an evaluation is correct."""

from __future__ import annotations

from rollyard_pipeline.agents.base import Agent, AgentContext
from rollyard_pipeline.errors import TaskInvalid
from rollyard_pipeline.tool_parsers.base import ParsedCall


class OracleAgent(Agent):
    """Runs `task.solution` through the tools that a policy would use. It asks no model."""

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
