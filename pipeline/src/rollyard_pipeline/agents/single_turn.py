"""The agent `single_turn`, which samples one answer without tools."""

from __future__ import annotations

from rollyard_pipeline.agents.base import Agent, AgentContext


class SingleTurnAgent(Agent):
    """Samples one turn and offers no tools."""

    uses_tools = False

    async def run(self, ctx: AgentContext) -> None:
        """Sample the one turn."""
        await ctx.turn()
