"""The sampling calls: what is sent, and how every answer is read and checked. Nothing here does I/O."""
