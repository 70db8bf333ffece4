"""What interceptors need: handlers made anew, and files that may change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the types only
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]


def remade(
    handler: Handler,
    behaviour: Any,
    request_deserializer: Any = None,
    response_serializer: Any = None,
) -> Handler:
    """A handler of the same kind, unary or streaming each way, that behaves otherwise."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(behaviour, request_deserializer, response_serializer)


def behaviour_of(handler: Handler) -> Any:
    """What a handler does: it has one of the four, by its kind."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def file_stamp(path: Path) -> tuple[int, int]:
    """Changes with the file; the same while there is none."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino
