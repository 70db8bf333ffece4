"""Checkpoints of other libraries, read into a model that this project's export understands."""
