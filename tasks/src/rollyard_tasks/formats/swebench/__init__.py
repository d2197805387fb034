"""The format `swebench`: rows of SWE-bench and of the data sets that are built like it."""
