"""What every other folder uses: problems, encodings, states, waits and bounded threads."""
