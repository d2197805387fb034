"""What keeps commands away from the exec server, the sandbox away from the network, and strangers out."""
