"""The submissions of one home, which are its Slurm jobs, and their records on disk.

The modules of this package submit these jobs, poll their states and stop them.
"""
