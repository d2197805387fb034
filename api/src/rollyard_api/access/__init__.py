"""This package decides who may make which call."""
