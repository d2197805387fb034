"""What a trainer does with results: it resumes, gathers batches of fresh groups, and makes arrays."""
