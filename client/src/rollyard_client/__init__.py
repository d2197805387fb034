"""The REST client, sync and async."""
