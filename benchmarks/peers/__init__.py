"""Compares the engine with CTranslate2 and transformers."""
