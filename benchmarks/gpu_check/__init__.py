"""Checks and measures everything that needs a CUDA device, in two commands."""
