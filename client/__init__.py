"""A small client: `Client` and `AsyncClient` for programs, `python -m client` for people.

Options and answers are the messages of `protos/seq2seq_v1.proto`.
"""

from seq2seq_serve.client.aio import AsyncClient
from seq2seq_serve.client.errors import ClientError, FieldViolation
from seq2seq_serve.client.rpcs import Translated
from seq2seq_serve.client.sync import Client, Pending
from seq2seq_serve.client.wire import Tls
from seq2seq_serve.clone import share_module
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    GenerateOptions,
    GenerateResponse,
    GenerateStreamResponse,
    Model,
    Version,
    VersionState,
)

share_module(__name__)

__all__ = [
    "AsyncClient",
    "Client",
    "ClientError",
    "FieldViolation",
    "GenerateOptions",
    "GenerateResponse",
    "GenerateStreamResponse",
    "Model",
    "Pending",
    "Tls",
    "Translated",
    "Version",
    "VersionState",
]
