"""The reward of these tasks, beside what their test scripts say."""

from rollyard_pipeline.rewards import reward_function


@reward_function
def quick(episode):
    """Score a solved task by its turns: 1 for one turn, 1/2 for two. What is not solved scores 0."""
    turns = sum(message["role"] == "assistant" for message in episode["messages"])
    return episode["reward"] / max(1, turns)
