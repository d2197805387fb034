"""The async client, from which the sync one in `_sync` is made."""
