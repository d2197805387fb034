"""The sync client, which `scripts/sync-client` makes from the async one in `_async`."""
