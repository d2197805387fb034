"""Real vLLM servers, the product before them, and the judges of its token ids."""
