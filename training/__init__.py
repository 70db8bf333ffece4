"""Torch: corpora, models, the training loop, checkpoints and scoring; does not know that ONNX exists."""
