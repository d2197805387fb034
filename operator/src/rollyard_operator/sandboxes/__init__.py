"""Sandbox pods: the loop that carries out plans, and the network isolation with its checks."""
