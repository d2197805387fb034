"""Processes and the home folder of drivers that run outside a cluster."""
