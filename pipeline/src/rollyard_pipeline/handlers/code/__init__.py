"""The handler `code` tests programs of the policy, and judges them outside of their processes."""
