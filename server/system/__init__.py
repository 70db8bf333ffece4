"""The process and its machine: log, memory, limits."""
