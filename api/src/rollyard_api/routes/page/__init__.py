"""The calls that the page and the command line make to look at the fleet, at jobs and at rollouts."""
