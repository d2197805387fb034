"""The record of a rollout: token ids, messages and turns, in a form that is safe to store."""
