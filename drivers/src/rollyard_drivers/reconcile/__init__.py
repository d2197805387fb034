"""The decisions of drivers, as pure functions from a job or a pool and what was observed of it to a plan."""
