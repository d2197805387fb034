"""The handler `harbor`: task folders in the format of Harbor."""
