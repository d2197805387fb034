"""The whole fleet at a glance: jobs, pools, workers and rates."""
