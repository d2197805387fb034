"""Agents: from the first prompt to the end of an episode. Entry points of `rollyard.agents`."""

from rollyard_pipeline.agents.base import Agent, AgentContext, AgentTurn

__all__ = ["Agent", "AgentContext", "AgentTurn"]
