"""Who may make which call."""
