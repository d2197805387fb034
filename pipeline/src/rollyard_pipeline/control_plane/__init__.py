"""The control plane as workers use it: its calls, the specs of jobs, and the leases that a worker holds."""
