"""The checks of `rollyard doctor`, with a module for each subject."""
