"""Agents, which play an episode from its first prompt to its end. Entry points of `rollyard.agents`."""

from rollyard_pipeline.agents.base import Agent, AgentContext, AgentTurn

__all__ = ["Agent", "AgentContext", "AgentTurn"]
