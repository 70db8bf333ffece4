"""The artefact contract between export and server: names, manifest, tokenizer. Knows no torch and no ONNX Runtime."""
