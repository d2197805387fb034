"""What every process of Rollyard does in the same way: logs, traces, private folders and pauses."""
