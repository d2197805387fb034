"""The sampling calls: their requests, and the reading and checking of every answer. Nothing here does I/O."""
