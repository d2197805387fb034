"""The output of the commands: tables, progress and trajectories."""
