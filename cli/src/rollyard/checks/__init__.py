"""The checks of `rollyard doctor`, except the short ones that `doctor` holds."""
