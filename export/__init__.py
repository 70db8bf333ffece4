"""From a training run to a bundle: graphs, precisions, and the proof that they agree with the trained model."""
