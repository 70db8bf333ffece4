"""The artefact contract between export and server: names, manifest, tokenizer; neither torch nor ONNX."""

from seq2seq_serve.clone import share_module

share_module(__name__)
