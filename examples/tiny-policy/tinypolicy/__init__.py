"""The parts of the tiny policy: tasks, demonstrations, training, export, evaluation."""
