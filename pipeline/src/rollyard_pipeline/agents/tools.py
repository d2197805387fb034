"""The agent `tools`, which samples turns, runs the calls and returns the results until the policy is done."""

from __future__ import annotations

from rollyard_pipeline.agents.base import Agent, AgentContext


class ToolsAgent(Agent):
    """Ends the episode on `submit`, on a turn without tool calls, or, truncated, at a limit."""

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
