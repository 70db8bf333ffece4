"""Checkpoints of Hugging Face: their settings, weights and tokenizers, as this project has them."""
