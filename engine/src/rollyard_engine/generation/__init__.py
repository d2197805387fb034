"""The computing part of the engine: the model, its caches, sampling, and the scheduler with its thread."""
