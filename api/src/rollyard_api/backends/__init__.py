"""Inference backends: pools, routing, circuits and measured speeds."""
