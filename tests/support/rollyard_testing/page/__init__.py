"""Stores of ended rollouts for tests and benchmarks of the page, and the attacks that trajectories hold."""
