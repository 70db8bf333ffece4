"""The artefact contract between export and server: names, manifest, tokenizer. Knows no torch, no ONNX."""
