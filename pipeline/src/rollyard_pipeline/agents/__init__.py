"""Agents: what happens between the first prompt and the end of an episode. Entry points of `rollyard.agents`."""

from rollyard_pipeline.agents.base import Agent, AgentContext, AgentTurn

__all__ = ["Agent", "AgentContext", "AgentTurn"]
