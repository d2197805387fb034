"""Trajectories in files: written from a server, read back, counted and summed up."""
