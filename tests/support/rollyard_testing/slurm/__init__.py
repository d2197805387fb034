"""A real Slurm of four nodes, and bridges on it."""
