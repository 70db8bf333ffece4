"""Training with torch: corpora, models, the training loop, checkpoints, scoring. ONNX is unknown here."""
