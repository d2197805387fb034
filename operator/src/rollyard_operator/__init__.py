"""Reconcile: from a job and what was observed to a plan."""
