"""The life of a rollout: its leases, the reports of its workers, and its end."""
