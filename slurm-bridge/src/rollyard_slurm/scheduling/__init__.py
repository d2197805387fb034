"""Decisions about time limits and successors, poll intervals, and nodes to avoid; all of them are pure."""
