"""Attacks on the product, and the product under attack."""
