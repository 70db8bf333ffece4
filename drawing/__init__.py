"""Draws what training and the client both show."""
