"""The control plane consists of the REST server, store, stage queues with leases, and backend router."""
