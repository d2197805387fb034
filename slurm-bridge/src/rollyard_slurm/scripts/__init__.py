"""Pure makers of batch scripts, and of the fields that slurmrestd takes beside them."""
