"""The control plane: REST server, store, stage queues with leases, and backend router."""
