"""Sandbox pods: the loop that carries plans out, the network isolation and its checks."""
