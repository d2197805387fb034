"""The handler `swe` runs hidden tests on the policy's changes of a repository, in a fresh sandbox."""
