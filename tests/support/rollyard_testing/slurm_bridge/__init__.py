"""A Slurm in memory, and a slurmrestd whose answers a test scripts."""
