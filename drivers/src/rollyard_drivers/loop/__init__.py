"""One pass of a driver over its jobs and pools, and the control plane that it reads from and reports to."""
