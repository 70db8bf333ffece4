"""Reads messages: options and sources of callers become requests of the engine."""
