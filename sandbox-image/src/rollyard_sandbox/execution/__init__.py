"""The things that the exec server runs for its clients: shells, programs and IPython, on one event loop."""
