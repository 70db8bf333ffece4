"""Attention models from a corpus to a gRPC service. In a clone, the folders here are links to those of the root."""

__version__ = "0.1.0"
