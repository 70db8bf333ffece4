"""Measures BLEU through the server, from a published corpus."""
