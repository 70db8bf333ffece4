"""A model's graphs as torch modules, and the weightless graphs of selection, moves and voice activity."""
