"""Manifests and task lists, read from text and checked."""
