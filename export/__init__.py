"""Export of a training run to a bundle: graphs, precisions, and the proof that they equal the model."""
