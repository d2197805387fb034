"""Calls to Slurm, which use either its own commands or slurmrestd."""
