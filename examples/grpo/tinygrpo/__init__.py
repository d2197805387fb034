"""The parts of the GRPO example: tasks, rollouts, batches, loss, checkpoints, evaluation and the loop."""
