"""Bulk work beside the same engine without files."""
