"""Images for sandboxes, made from this machine's own programs."""
