"""Measures the server under load, through gRPC."""
