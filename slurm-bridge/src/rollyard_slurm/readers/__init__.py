"""Readers of Slurm's answers. All modules are pure.

They read the output of commands, the JSON of slurmrestd, the reasons of pending jobs, and comments of jobs.
"""
