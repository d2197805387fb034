"""How a sandbox is started: bubblewrap, bare processes, and what all kinds of sandboxes share."""
