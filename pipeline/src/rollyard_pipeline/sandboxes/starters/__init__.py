"""Starters of sandboxes: bubblewrap, bare processes, and what all kinds of sandboxes share."""
