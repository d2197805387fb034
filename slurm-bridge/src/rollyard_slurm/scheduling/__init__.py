"""Decisions about time limits and successors. All modules are pure."""
