"""What sandboxes use of their machine: control groups, processes, the run folder and its disk."""
