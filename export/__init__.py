"""From a training run to a bundle: graphs, precisions, and the proof that they compute the same."""
