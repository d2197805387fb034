"""The agent `single_turn`: one answer, no tools."""

from __future__ import annotations

from rollyard_pipeline.agents.base import Agent, AgentContext


class SingleTurnAgent(Agent):
    uses_tools = False

    async def run(self, ctx: AgentContext) -> None:
        await ctx.turn()
