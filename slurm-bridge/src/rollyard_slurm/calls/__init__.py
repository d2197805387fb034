"""Calls to Slurm, by its own commands or by slurmrestd."""
