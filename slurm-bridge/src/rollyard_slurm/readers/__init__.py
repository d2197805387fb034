"""Readers of Slurm's answers: commands' output, slurmrestd's JSON, reasons and comments; all of them are
pure."""
