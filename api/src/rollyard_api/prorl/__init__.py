"""The calls of ProRL Agent's server, on a listener of their own, mapped to a stream RolloutJob."""
