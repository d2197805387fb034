"""One controller for each RolloutJob and BackendPool, and what controllers share."""
