"""The calls of ProRL Agent's server, on a listener of their own, mapped on a stream RolloutJob."""
