"""Pure readers of Slurm's answers: commands' output, slurmrestd's JSON, reasons and our jobs' comments."""
