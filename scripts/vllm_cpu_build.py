"""How the demos run vLLM's CPU build."""

CPU_ARGUMENTS = (
    "--enforce-eager",
    "--dtype=float32",
    "--block-size=32",
    # vLLM 0.32's CPU build dies of a prompt that is read in parts while its request has a seed.
    "--no-enable-chunked-prefill",
)
CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "$(BACKEND_INDEX)",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
