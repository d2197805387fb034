"""Decisions about time limits and successors, poll intervals, and nodes to avoid. All modules are pure."""
