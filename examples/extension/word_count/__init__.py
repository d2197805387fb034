"""An example extension: tasks that ask how many words a file has."""
