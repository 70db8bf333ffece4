"""A small client: `Client` and `AsyncClient` for programs, `python -m client` for people.

Requests and answers are the messages of `protos/seq2seq_v1.proto`, so every option of the API is here.
"""

from client.aio import AsyncClient
from client.errors import ClientError, FieldViolation
from client.many import Translated
from client.sync import Client, Pending
from client.wire import Tls
from protos.seq2seq_v1_pb2 import (
    GenerateOptions,
    GenerateResponse,
    GenerateStreamResponse,
    Model,
    Version,
    VersionState,
)

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
