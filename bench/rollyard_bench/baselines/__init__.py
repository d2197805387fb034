"""What Rollyard is measured against, written from public interfaces only."""
