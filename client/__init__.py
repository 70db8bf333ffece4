"""A small client: `Client` and `AsyncClient` for programs, `python -m client` for people.

Answers are the messages of `protos/seq2seq_v1.proto`. Options are `GenerateOptions` or values by name, like
`{"beam_size": 4, "long_source": "split"}`, where a text is read as the command's flag of this name is.
"""

import os

from seq2seq_serve.commands import runs_as

if runs_as("client"):
    # gRPC's own log would repeat our errors in other words. gRPC reads this when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from seq2seq_serve.client.aio import AsyncClient
from seq2seq_serve.client.errors import ClientError, FieldViolation
from seq2seq_serve.client.files.glossary import read_glossary
from seq2seq_serve.client.files.memory import TranslationMemory, read_memory
from seq2seq_serve.client.live import (
    LiveEvent,
    LiveResult,
    LiveSegment,
    LiveText,
    SpeechBegan,
    SpeechEnded,
)
from seq2seq_serve.client.rpcs import Translated
from seq2seq_serve.client.sync import Client, Pending
from seq2seq_serve.client.wire import Tls
from seq2seq_serve.clone import share_module
from seq2seq_serve.protos.options import Options
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    FinishReason,
    FinishSegment,
    GenerateOptions,
    GenerateResponse,
    GenerateStreamResponse,
    LengthPenaltyFormula,
    LongSource,
    Model,
    Source,
    TurnDetection,
    Version,
    VersionState,
)

share_module(__name__)

__all__ = [
    "AsyncClient",
    "Client",
    "ClientError",
    "FieldViolation",
    "FinishReason",
    "FinishSegment",
    "GenerateOptions",
    "GenerateResponse",
    "GenerateStreamResponse",
    "LengthPenaltyFormula",
    "LiveEvent",
    "LiveResult",
    "LiveSegment",
    "LiveText",
    "LongSource",
    "Model",
    "Options",
    "Pending",
    "Source",
    "SpeechBegan",
    "SpeechEnded",
    "Tls",
    "Translated",
    "TranslationMemory",
    "TurnDetection",
    "Version",
    "VersionState",
    "read_glossary",
    "read_memory",
]
