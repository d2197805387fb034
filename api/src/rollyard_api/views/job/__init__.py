"""Lists and statistics of one job."""
