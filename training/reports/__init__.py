"""Reports of a run: progress, metrics, learning curve, attention."""
