"""The calls that change a server's weights and report which it has, for vLLM and for SGLang."""
