"""Task folders in the format of Harbor: their files, their archives, and what their `task.toml` says."""
