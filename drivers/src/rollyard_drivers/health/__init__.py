"""The health checks of inference backends that a driver has started."""
