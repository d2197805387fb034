"""Inference servers whose answers a test scripts, in the shapes of vLLM and of SGLang."""
