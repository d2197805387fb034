"""Batch scripts, and the fields that slurmrestd takes beside them; all modules are pure."""
