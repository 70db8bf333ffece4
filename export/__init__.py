"""Export of a training run to a bundle: graphs, precisions, and the proof that they equal the model."""

from seq2seq_serve.clone import share_module

share_module(__name__)
