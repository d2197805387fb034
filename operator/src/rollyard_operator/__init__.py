"""The Kubernetes driver: an operator for RolloutJobs, BackendPools and sandbox pods."""
