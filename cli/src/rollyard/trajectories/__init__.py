"""Files of trajectories, which are written from a server, read back and summarized."""
