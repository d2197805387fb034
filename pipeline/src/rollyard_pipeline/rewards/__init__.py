"""Rewards are made of components here: penalties, checks of form, functions of users and reward services."""

from rollyard_pipeline.rewards.function import RewardFunction

__all__ = ["RewardFunction"]
