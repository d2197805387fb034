"""What the exec server runs for its clients: shells, programs and IPython, watched by one event loop."""
