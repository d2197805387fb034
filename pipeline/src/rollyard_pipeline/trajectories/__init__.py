"""The record of a rollout: token ids, messages and turns, made safe to store."""
