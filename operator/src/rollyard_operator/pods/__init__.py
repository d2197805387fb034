"""Pods as JSON: how they are made, which templates are permitted, and what a status means. All is pure."""
