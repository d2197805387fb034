"""The calls that change a server's weights and tell which it has, for vLLM and for SGLang."""
