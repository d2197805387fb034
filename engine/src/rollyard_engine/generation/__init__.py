"""The computing side: the model, its caches, sampling, and the scheduler with its thread."""
