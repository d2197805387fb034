"""The agent `second_look`, which asks the policy once to check its answer."""

from rollyard_pipeline.agents import Agent, AgentContext


class SecondLookAgent(Agent):
    """An agent like `tools`, which asks the policy once to look again before it accepts an answer."""

    async def run(self, ctx: AgentContext) -> None:
        asked = False
        while not ctx.finished:
            turn = await ctx.turn()
            if turn is None or ctx.finished:
                return
            if turn.calls:
                await ctx.call_all(turn.calls)
            elif asked:
                ctx.finish()
            else:
                asked = True
                ctx.say("Look at the file once more, and state the number again.")
