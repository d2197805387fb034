"""The control plane: REST, store, stage queues with leases, backend router."""
