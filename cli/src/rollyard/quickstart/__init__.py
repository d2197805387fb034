"""The quickstart: one job on this machine, in the middle of which vLLM servers can get new weights."""
