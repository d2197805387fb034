"""RolloutJobs: their rows, tasks, uploads, events and their REST form."""
