"""This package decides who may make which call and how much of the control plane a namespace may hold."""
