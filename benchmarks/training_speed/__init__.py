"""Compares the training loop's speed with that of a plain loop."""
