"""Manifests that lie just beyond the bounds of the resource models."""
