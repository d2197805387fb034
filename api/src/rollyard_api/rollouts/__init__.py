"""The life of a rollout: its leases, what workers report of them, and how it ends."""
