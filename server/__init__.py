"""The decoding engine and its services: ONNX Runtime, grpcio, prometheus-client and numpy; never torch."""

from seq2seq_serve.clone import share_module

share_module(__name__)
