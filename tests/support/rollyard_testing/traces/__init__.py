"""A receiver of traces for tests, and what they look for in traces."""
