"""Batch scripts, and the fields that slurmrestd takes together with them. All modules are pure."""
