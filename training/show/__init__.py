"""The page of `python -m training show`: curves, samples and attention of runs, also while they learn."""
