"""Decisions about sandbox pods. They are pure functions from claims and observed pods to a plan."""
