"""The controllers: one loop for each RolloutJob and BackendPool, and the parts that they share."""
