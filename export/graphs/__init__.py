"""A model's graphs as torch modules, and the weightless graphs that select tokens and move rows."""
