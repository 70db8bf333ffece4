"""Metrics for operators, and the statistics of the Open Inference Protocol."""
