"""The isolation of the server from commands, of the sandbox from the network, and of both from strangers."""
