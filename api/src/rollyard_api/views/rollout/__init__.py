"""One rollout piece by piece: its messages, its tokens, and its turns while it runs."""
