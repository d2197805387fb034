"""The quickstart: one job on this machine, and new weights in the middle of it where vLLM serves."""
