"""A cluster in memory for the operator."""
