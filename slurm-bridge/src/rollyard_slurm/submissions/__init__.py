"""Submissions: the Slurm jobs of one home, their records on disk, and the driver that keeps them."""
