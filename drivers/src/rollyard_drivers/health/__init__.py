"""The health of inference backends that a driver started."""
