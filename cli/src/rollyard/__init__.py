"""The rollyard command line and the local driver."""
