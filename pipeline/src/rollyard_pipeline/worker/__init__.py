"""The stage worker: leases for three stages, work on them, heartbeats and reports of outcomes."""
