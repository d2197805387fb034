"""Access to the Kubernetes API: the client, watches, caches of objects, labels and events."""
