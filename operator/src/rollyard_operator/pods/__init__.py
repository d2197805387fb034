"""Pods as JSON: how they are made, which templates are permitted, and what their status means. Pure."""
