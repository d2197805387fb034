"""The format `swebench`: rows of SWE-bench and of the data sets modelled on it."""
