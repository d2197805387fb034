"""The control plane as workers see it: its calls, the specs of jobs, and the leases that a worker holds."""
