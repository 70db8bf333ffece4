"""Sounds that are transcribed while they come."""
