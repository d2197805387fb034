"""The time limits of Run: that of the stage, and those of a handler that plays the agent several times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from rollyard_crds.task import Task
from rollyard_inference.errors import BackendUnavailable

from rollyard_pipeline.agents.base import Agent, AgentContext
from rollyard_pipeline.backends import BackendSession
from rollyard_pipeline.errors import HandlerBlocked
from rollyard_pipeline.handlers.isolated.places import blocked
from rollyard_pipeline.trajectories.episode import Episode

_LONGEST_WAITED: Final = 14_400.0  # The longest wait for backends, in seconds, that is added to a limit.


class RunLimits:
    """The limits that are in force, all of which wait while a backend is paused, updated or too busy."""

    def __init__(self, session: BackendSession | None, episode: Episode) -> None:
        self._session = session
        self._episode = episode
        self._limits: list[asyncio.Timeout] = []
        if session is not None:
            session.on_wait = self._extend

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Let the body take `seconds`, then end it and truncate the episode as `RunTimeout`.

        Raises:
            HandlerBlocked: The time was spent in the code of the handler.
            BackendUnavailable: The time was spent on a backend that did not answer, which is not the
                policy's fault.
        """
        limit = asyncio.timeout(seconds)
        self._limits.append(limit)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            if place := blocked(error):
                raise HandlerBlocked(f"Run took longer than {seconds:g} s: {place}") from error
            silence = await self._session.silence() if self._session is not None else None
            if silence is not None:
                raise BackendUnavailable(
                    f"no backend answered until Run's limit of {seconds:g} s; last: {silence}"
                ) from None
            self._episode.truncate("RunTimeout")
        finally:
            self._limits.remove(limit)

    def _extend(self, seconds: float) -> None:
        for limit in self._limits:
            when = limit.when()
            waited = self._session.waited_seconds if self._session is not None else 0.0
            if when is not None and not limit.expired() and waited <= _LONGEST_WAITED:
                limit.reschedule(when + seconds)


class AgentRuns:
    """The agent of a rollout, which a handler may let play several times; see `handlers.base.AgentSteps`."""

    def __init__(self, agent: Agent, context: AgentContext, limits: RunLimits) -> None:
        self._agent = agent
        self._context = context
        self._limits = limits

    async def play(self) -> None:
        """Play the agent until it ends the episode."""
        await self._agent.run(self._context)

    async def step(self, task: Task, seconds: float | None) -> bool:
        """Play the agent for one step, and return whether a further step may follow."""
        self._context.task = task
        if seconds is None:
            await self.play()
        else:
            async with self._limits.within(seconds):
                await self.play()
        return not self._context.episode.truncated_reason

    def say(self, text: str) -> None:
        """Continue the episode with a user's message."""
        self._context.episode.resume(text)
