"""The reward of these tasks, beside what their test scripts say."""

from rollyard_pipeline.rewards import reward_function


@reward_function
def quick(episode):
    """Score a solved task by its turns: 1 for two, which each of these tasks needs, and 1/2 for four."""
    turns = sum(message["role"] == "assistant" for message in episode["messages"])
    return episode["reward"] * min(1.0, 2 / max(1, turns))
