"""Weight updates: what was asked for, and how every backend comes to it."""
