"""The code that all drivers share: the reconcile, the driver loop, health, command lines, and processes."""
