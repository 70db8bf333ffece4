"""The decoding engine and its services: ONNX Runtime, grpcio, prometheus-client and numpy; never torch."""

import os

from seq2seq_serve.clone import share_module

# Libraries read these when they are imported: ONNX Runtime reports every session to Microsoft otherwise, and
# the threads of the tokenizers would compete with the engines'.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

share_module(__name__)
