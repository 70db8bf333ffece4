"""The artefact contract between export and server: names, manifest, tokenizer; neither torch nor ONNX."""
