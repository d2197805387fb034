"""Decisions about sandbox pods, as pure functions: from claims and observed pods to a plan."""
