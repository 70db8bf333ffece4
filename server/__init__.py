"""The decoding engine and its services: ONNX Runtime, grpcio, prometheus-client and numpy; never torch."""
