"""Sandboxes that a container engine of this machine starts: Podman or Docker."""
