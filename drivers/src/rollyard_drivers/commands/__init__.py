"""The command lines of the processes that every driver starts."""
