"""The network that a worker lends to a sandbox: a proxy that reaches the hosts of its job's list."""
