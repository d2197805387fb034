"""The quickstart: one job on this machine, during which vLLM servers can get new weights."""
