"""The protocol of inference servers that resemble vLLM or SGLang: health, sampling, weights and metrics."""
