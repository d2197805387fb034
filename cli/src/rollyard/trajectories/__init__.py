"""Files of trajectories, which are exported from a server, read back and summarized."""
