"""The exec server inside every sandbox, and its client."""
