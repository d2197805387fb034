"""What `rollyard doctor` looks at, a module for each noun."""
