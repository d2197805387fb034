"""The protocol of inference servers shaped like vLLM or SGLang: health, sampling, weights, metrics."""
