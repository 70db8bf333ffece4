"""Measures what adapters cost and save, and tunes one of a published model."""
