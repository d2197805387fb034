"""RolloutJobs: their rows, tasks, uploads, events and REST form."""
