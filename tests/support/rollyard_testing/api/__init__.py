"""A backend whose answers a test scripts."""
