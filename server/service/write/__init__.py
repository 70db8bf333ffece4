"""Writes messages: results of the engine become answers for callers."""
