"""A Rollyard on one machine whose processes are killed, and what judges it from outside."""
