"""What every process of Rollyard does in the same way: its logs, traces, private folders and pauses."""
