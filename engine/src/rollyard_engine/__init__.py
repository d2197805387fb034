"""The embedded inference backend, speaking vLLM's calls."""
