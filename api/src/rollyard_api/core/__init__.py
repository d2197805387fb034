"""What all other folders use: problems, encodings, states, waits and bounded threads."""
