"""Describes the RPCs of both clients, one function for each: its arguments, its request and its answer.

`Client` and `AsyncClient` make their methods from these functions, and only differ in how they wait.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import update_wrapper
from itertools import islice
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

from google.protobuf.message import Message

from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.wire import (
    CHANNEL_OPTIONS,
    DEFAULT_ADDRESS,
    DEFAULT_TIMEOUT_SECONDS,
    DIRECT_OPTIONS,
    MAX_BATCH,
    Item,
    Tls,
    batch_request,
    generate_request,
    items_request,
)
from seq2seq_serve.protos.details_pb2 import HealthCheckRequest, HealthCheckResponse
from seq2seq_serve.protos.options import Options
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    GenerateBatchResponse,
    GenerateResponse,
    GenerateStreamResponse,
    GetModelRequest,
    ListModelsRequest,
    ListVersionsRequest,
    LoadModelRequest,
    Model,
    ScoreRequest,
    ScoreResponse,
    UnloadModelRequest,
    Version,
)
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import RepositoryStub, Seq2SeqStub
from seq2seq_serve.protos.sources import Sources, TextOrIds, check_texts, sources_of, target_of

_LONGEST_SECONDS = 1e9  # of a deadline; gRPC ends a call with a longer one at once

# The place of an item among those of its call, with its answer or error
Outcome = tuple[int, GenerateResponse | ClientError]

Answer = TypeVar("Answer")
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rpc(Generic[Answer]):
    """One RPC, ready to be sent.

    Attributes:
        method: The method of a stub.
        direct: The same on the channel without health checks, for a server that reports NOT_SERVING and still
            accepts calls.
        request: The message for it.
        settings: The timeout and metadata, by gRPC's names.
        read: Extracts the caller's answer from the server's message.
        first: Answers of a stream that are known without the server.
    """

    method: Any
    direct: Any
    request: Message
    settings: dict[str, Any]
    read: Callable[[Any], Answer]
    first: Sequence[Answer] = ()

    @property
    def directly(self) -> Rpc[Answer]:
        """The same RPC for the channel without health checks."""
        return replace(self, method=self.direct, first=())


@dataclass(frozen=True)
class Translated:
    """The result of one text of `translate_many` or `generate_batch`.

    Attributes:
        source: The text or other source, as given.
        answer: The whole answer; without hypotheses if the text was blank or failed.
        error: The error, if the text failed.
        from_memory: Whether the answer is of a translation memory.
    """

    source: Sources
    answer: GenerateResponse
    error: ClientError | None = None
    from_memory: bool = False

    @property
    def text(self) -> str:
        """The best target; empty for a blank text.

        Raises:
            ClientError: The text failed.
        """
        if self.error is not None:
            raise self.error
        return self.answer.hypotheses[0].text if self.answer.hypotheses else ""


def translated(source: Sources, outcome: GenerateResponse | ClientError) -> Translated:
    """Returns the result of one item. A blank text has an empty answer; among several sources it fails."""
    if isinstance(outcome, GenerateResponse):
        return Translated(source, outcome)
    is_blank = outcome.is_blank_source and isinstance(source, str)
    return Translated(source, GenerateResponse(), None if is_blank else outcome)


class Connection:
    """The base class of both clients, with channels, stubs and token. Its arguments are those of `Client`."""

    _grpc: ClassVar[ModuleType]  # `grpc` or `grpc.aio`
    _needs_loop: ClassVar[bool] = False

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        tls: Tls | None = None,
        token: str = "",
    ) -> None:
        if self._needs_loop:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                raise RuntimeError("AsyncClient belongs to an event loop: create it in a coroutine") from None
        self.address = address
        self._timeout_seconds = timeout_seconds
        self._authorization = token and f"Bearer {token}"
        secure = {} if tls is None else {"credentials": tls.credentials()}
        open_channel = self._grpc.secure_channel if secure else self._grpc.insecure_channel
        self._channels = [
            open_channel(address, options=options, **secure) for options in (CHANNEL_OPTIONS, DIRECT_OPTIONS)
        ]
        balanced, direct = self._channels
        self._generation: Any = Seq2SeqStub(balanced)
        self._models: Any = Seq2SeqStub(direct)
        self._repository: Any = RepositoryStub(direct)
        self._check: Any = direct.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )

    def _rpc(
        self,
        method: Any,
        request: Message,
        read: Callable[[Any], Answer],
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> Rpc[Answer]:
        """Prepares an RPC with its timeout and metadata. If there is no request id, the server creates one.

        `method` is a method of a stub, or the name of one that generates, for servers that are ready.

        Raises:
            ValueError: The timeout is not a number.
        """
        timeout = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        if timeout is not None and math.isnan(timeout):
            raise ValueError("the timeout is not a number")
        if timeout is not None and timeout > _LONGEST_SECONDS:
            timeout = None
        given = {"x-request-id": request_id, "authorization": self._authorization}
        metadata = tuple((key, value) for key, value in given.items() if value)
        direct = method
        if isinstance(method, str):
            method, direct = getattr(self._generation, method), getattr(self._models, method)
        return Rpc(method, direct, request, {"timeout": timeout, "metadata": metadata}, read)

    def _rpc_of_items(
        self, items: Sequence[Item], *, model: str = "", timeout_seconds: float | None = None
    ) -> Rpc[list[Outcome]]:
        """Prepares the RPC of several items of one kind, a stream, or the unary one of an item alone."""
        request = items_request(items, model)
        if len(items) == 1:
            return self._rpc("Generate", request, lambda answer: [(0, answer)], timeout_seconds)
        return self._rpc("GenerateBatch", request, _outcomes, timeout_seconds)


def translate(
    client: Connection,
    text: str,
    *,
    model: str = "",
    options: Options | None = None,
    timeout_seconds: float | None = None,
    request_id: str = "",
) -> Rpc[str]:
    """Returns the best target of one source, as text."""
    rpc = generate(
        client, text, model=model, options=options, timeout_seconds=timeout_seconds, request_id=request_id
    )
    return Rpc(rpc.method, rpc.direct, rpc.request, rpc.settings, lambda answer: answer.hypotheses[0].text)


def generate(
    client: Connection,
    source: Sources,
    *,
    model: str = "",
    options: Options | None = None,
    timeout_seconds: float | None = None,
    request_id: str = "",
) -> Rpc[GenerateResponse]:
    """Returns the whole answer to one source: a text, token ids, the bytes of a file, or an array.

    A model with several inputs takes a mapping from their names to such values.
    """
    request = generate_request(source, model, options)
    return client._rpc("Generate", request, _whole, timeout_seconds, request_id)


def stream(
    client: Connection,
    source: Sources,
    *,
    model: str = "",
    options: Options | None = None,
    timeout_seconds: float | None = None,
    request_id: str = "",
) -> Rpc[GenerateStreamResponse]:
    """Yields pieces as they are decoded, then the whole answer; closing the iterator cancels the call."""
    request = generate_request(source, model, options)
    return client._rpc("GenerateStream", request, _whole, timeout_seconds, request_id)


def generate_batch(
    client: Connection,
    sources: Iterable[Sources],
    *,
    model: str = "",
    options: Options | None = None,
    timeout_seconds: float | None = None,
    request_id: str = "",
) -> Rpc[tuple[int, Translated]]:
    """Yields the place of each source with its answer or error, in the order of completion.

    Blank texts, and items that cannot be sent, get the results that `translate_many` gives them. A call takes
    at most 2,700 sources in 4 MiB. `translate_many` takes any number of texts, yields them in order, and
    retries temporary failures.
    """
    check_texts(sources)
    given = list(islice(sources, MAX_BATCH + 1))  # they may have no end
    request, places, errors = batch_request(given, model, options)

    def read(answer: GenerateBatchResponse) -> tuple[int, Translated]:
        index, outcome = _outcome(answer)
        return places[index], translated(given[places[index]], outcome)

    rpc = client._rpc("GenerateBatch", request, read, timeout_seconds, request_id)
    return replace(rpc, first=[(place, translated(given[place], errors[place])) for place in errors])


def score(
    client: Connection,
    source: Sources,
    target: TextOrIds,
    *,
    model: str = "",
    source_language: str = "",
    target_language: str = "",
    task: str = "",
    timeout_seconds: float | None = None,
    request_id: str = "",
) -> Rpc[ScoreResponse]:
    """Returns the log-probabilities of a given target, a text or its token ids, for a source.

    Languages and task are those of `GenerateOptions`; an empty one is the model's default.
    """
    request = ScoreRequest(
        model=model,
        sources=sources_of(source),
        target=target_of(target),
        source_language=source_language,
        target_language=target_language,
        task=task,
    )
    return client._rpc("Score", request, _whole, timeout_seconds, request_id)


def models(client: Connection) -> Rpc[list[Model]]:
    """Returns the models that the server serves, the default one first."""
    return client._rpc(client._models.ListModels, ListModelsRequest(), lambda answer: list(answer.models))


def model(client: Connection, name: str = "") -> Rpc[Model]:
    """Returns one served model; the empty name means the default one."""
    return client._rpc(client._models.GetModel, GetModelRequest(model=name), lambda answer: answer.model)


def versions(client: Connection, model: str = "") -> Rpc[list[Version]]:
    """Returns every version on the server's disk, of all models or of one, and whether it is served."""
    request = ListVersionsRequest(model=model)
    return client._rpc(client._repository.ListVersions, request, lambda answer: list(answer.versions))


def load(
    client: Connection, model: str, version: str = "", *, timeout_seconds: float | None = None
) -> Rpc[Model]:
    """Loads a version of a model, by default the newest, and waits until the server serves it."""
    request = LoadModelRequest(model=model, version=version)
    return client._rpc(client._repository.LoadModel, request, lambda answer: answer.model, timeout_seconds)


def unload(client: Connection, model: str) -> Rpc[None]:
    """Unloads a model: the server stops serving it."""
    return client._rpc(client._repository.UnloadModel, UnloadModelRequest(model=model), lambda _: None)


def health(client: Connection, service: str = "") -> Rpc[str]:
    """Returns `SERVING` or `NOT_SERVING` for the whole server, a service, or a model."""
    name_of = HealthCheckResponse.ServingStatus.Name
    request = HealthCheckRequest(service=service)
    return client._rpc(client._check, request, lambda answer: name_of(answer.status))


def documented(method: Method, prepare: Callable[..., Any], returned: str = "{}") -> Method:
    """Gives a client's method the name, docstring and arguments of a function above.

    Args:
        method: Of `Client` or `AsyncClient`.
        prepare: The function that prepares its RPC.
        returned: The type that the method returns, with `{}` in place of the answer's type.
    """
    update_wrapper(method, prepare)
    signature = inspect.signature(prepare)
    answer = signature.return_annotation.removeprefix("Rpc[").removesuffix("]")
    signature = signature.replace(return_annotation=returned.format(answer))
    method.__signature__ = signature  # type: ignore[attr-defined]  # which `help` and IPython show
    return method


def _whole(answer: Any) -> Any:
    return answer


def _outcomes(answer: GenerateBatchResponse) -> list[Outcome]:
    return list(map(_outcome, (answer, *answer.more)))


def _outcome(answer: GenerateBatchResponse) -> Outcome:
    is_error = answer.WhichOneof("outcome") == "error"
    return answer.index, ClientError.from_batch(answer.error) if is_error else answer.response
