"""Decisions about time limits and successors, and nodes to avoid. All modules are pure."""
