"""An overview of the whole fleet: jobs, pools, workers and rates."""
