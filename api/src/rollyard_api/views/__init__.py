"""What people look at: the fleet, the statistics and lists of a job, and a rollout piece by piece."""
