"""The stage worker: it leases rollouts for three stages, works on them, and reports the outcomes."""
