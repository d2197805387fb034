"""The processes in which the calls of users' handlers run, so that none of them can block a worker."""
