"""Trajectory records of rollouts that have ended, and the store that keeps them."""
