"""This package holds what all other folders use: problems, encodings, states, waits and bounded threads."""
