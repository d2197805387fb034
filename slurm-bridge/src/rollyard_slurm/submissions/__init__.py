"""The submissions of one home: its Slurm jobs, their records on disk, and what submits, polls and stops
them."""
