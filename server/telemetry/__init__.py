"""What operators see: metrics, and the statistics of the protocols."""
