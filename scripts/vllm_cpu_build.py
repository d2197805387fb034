"""How the demos on clusters run vLLM's CPU build: as the quickstart does, and without the network."""

from rollyard.quickstart import vllm_servers

CPU_ARGUMENTS = vllm_servers.CPU_ARGUMENTS
CPU_ENVIRONMENT = {**vllm_servers.CPU_ENVIRONMENT, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
