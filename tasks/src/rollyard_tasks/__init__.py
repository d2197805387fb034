"""The tasks of jobs: files and lists of tasks, the formats of known data sets, and task folders of Harbor."""
