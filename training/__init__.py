"""Training with torch: corpora, models, the training loop, checkpoints, scoring. ONNX is unknown here."""

from seq2seq_serve.clone import share_module

share_module(__name__)
