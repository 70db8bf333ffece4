"""The client for ordinary code: every call blocks until its answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from client.errors import ClientError
from client.many import DEFAULT_GIVE_UP_SECONDS, DEFAULT_IN_FLIGHT, Call, Dispatcher, Translated, check_texts
from client.wire import (
    CHANNEL_OPTIONS,
    DEFAULT_ADDRESS,
    DEFAULT_TIMEOUT_SECONDS,
    DIRECT_OPTIONS,
    ChannelOptions,
    Defaults,
    TextOrIds,
    Tls,
    generate_request,
    score_request,
)
from protos.seq2seq_v1_pb2 import (
    GenerateOptions,
    GenerateRequest,
    GenerateResponse,
    GenerateStreamResponse,
    GetModelRequest,
    ListModelsRequest,
    ListVersionsRequest,
    LoadModelRequest,
    Model,
    ScoreResponse,
    UnloadModelRequest,
    Version,
)
from protos.seq2seq_v1_pb2_grpc import RepositoryStub, Seq2SeqStub


class Client:
    """A connection to a server, for any number of threads; used as a context manager, or closed.

    Every method raises `ClientError` where the call fails, and `ValueError` for a text that cannot be sent.

    Args:
        address: `host:port`.
        timeout_seconds: Deadline of a call that names none; None waits for ever.
        tls: Files for an encrypted connection; None does not encrypt.
        token: Identifies the caller to a server that requires it.

    Raises:
        OSError: A file of `tls` cannot be read.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        tls: Tls | None = None,
        token: str = "",
    ) -> None:
        self.address = address
        self._defaults = Defaults(timeout_seconds, token)
        self._channel = _channel(address, tls, CHANNEL_OPTIONS)
        self._direct = _channel(address, tls, DIRECT_OPTIONS)
        self._stub: Any = Seq2SeqStub(self._channel)  # type: ignore[no-untyped-call]
        self._direct_stub: Any = Seq2SeqStub(self._direct)  # type: ignore[no-untyped-call]
        self._repository: Any = RepositoryStub(self._direct)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._direct)

    def translate(self, text: str, *, model: str = "", options: GenerateOptions | None = None) -> str:
        """Returns the best target of one source, as text."""
        return self.generate(text, model=model, options=options).hypotheses[0].text

    def generate(
        self,
        source: TextOrIds,
        *,
        model: str = "",
        options: GenerateOptions | None = None,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> GenerateResponse:
        """Returns the whole answer to one source, a text or its token ids."""
        pending = self.submit(
            source, model=model, options=options, timeout_seconds=timeout_seconds, request_id=request_id
        )
        return pending.result()

    def submit(
        self,
        source: TextOrIds,
        *,
        model: str = "",
        options: GenerateOptions | None = None,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> Pending:
        """Like `generate`, without waiting. For many texts there is `translate_many`."""
        return self._submit(generate_request(source, model, options), timeout_seconds, request_id)

    def translate_many(
        self,
        texts: Iterable[TextOrIds],
        *,
        model: str = "",
        options: GenerateOptions | None = None,
        in_flight: int = DEFAULT_IN_FLIGHT,
        give_up_seconds: float = DEFAULT_GIVE_UP_SECONDS,
        timeout_seconds: float | None = None,
    ) -> Iterator[Translated]:
        """Yields the targets of many texts, in their order, each as soon as it and all before it are done.

        Where a single text fails, its result has the error, and the others go on; a blank text has an empty
        target. A call that an overloaded server refuses is sent again after the time that it named, with
        fewer in flight. A server that restarts is waited for.

        Args:
            texts: Read by a thread of its own, some hundred texts ahead at most: may be endless or slow.
            model: As for `generate`.
            options: The options of every text.
            in_flight: The most calls at a time.
            give_up_seconds: How long the server may fail to answer any call.
            timeout_seconds: Deadline of each call.

        Raises:
            ClientError: The server did not answer for that long, refuses all calls (as without a token), or
                failed several texts in a row. The results so far have been yielded.
            TypeError: `texts` is a single text, or one of them is neither a text nor token ids.
        """
        check_texts(texts)
        dispatcher = Dispatcher(
            partial(generate_request, model=model, options=options), in_flight, give_up_seconds
        )
        events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        room, has_left = threading.Semaphore(dispatcher.max_held), threading.Event()

        def read() -> None:
            try:
                iterator = iter(texts)
                while room.acquire() and not has_left.is_set():
                    events.put(partial(dispatcher.add, next(iterator)))
            except StopIteration:
                events.put(dispatcher.finish)
            except Exception as error:
                events.put(partial(dispatcher.finish, error))

        under_way: set[Pending] = set()

        def end(call: Call, pending: Pending) -> None:
            under_way.remove(pending)
            dispatcher.end(call, pending.outcome())

        # A daemon, so that Ctrl-C ends a program that waits for a line to be typed.
        threading.Thread(target=read, daemon=True).start()
        try:
            while not dispatcher.is_over:
                while (call := dispatcher.next_call()) is not None:
                    assert call.request is not None
                    pending = self._submit(call.request, timeout_seconds)
                    under_way.add(pending)
                    pending.when_done(partial(events.put, partial(end, call, pending)))
                with suppress(queue.Empty):
                    events.get(timeout=dispatcher.seconds_to_wait())()
                for result in dispatcher.results():
                    yield result
                    room.release()
        finally:
            has_left.set()
            room.release()
            for pending in under_way:
                pending.cancel()
        if dispatcher.error is not None:
            raise dispatcher.error

    def _submit(
        self, request: GenerateRequest, timeout_seconds: float | None, request_id: str = ""
    ) -> Pending:
        options = self._defaults.options(timeout_seconds, request_id)
        return Pending(self._stub.Generate.future(request, **options), self.address)

    def stream(
        self,
        source: TextOrIds,
        *,
        model: str = "",
        options: GenerateOptions | None = None,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> Iterator[GenerateStreamResponse]:
        """Yields pieces as they are decoded, then the whole answer; leaving the loop cancels the call."""
        call = self._stub.GenerateStream(
            generate_request(source, model, options),
            **self._defaults.options(timeout_seconds, request_id),
        )
        try:
            with _client_errors(self.address):
                yield from call
        finally:
            call.cancel()

    def score(
        self,
        source: TextOrIds,
        target: TextOrIds,
        *,
        model: str = "",
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> ScoreResponse:
        """Returns the log-probabilities of a given target, a text or its token ids."""
        with _client_errors(self.address):
            answer: ScoreResponse = self._stub.Score(
                score_request(source, target, model),
                **self._defaults.options(timeout_seconds, request_id),
            )
        return answer

    def models(self) -> list[Model]:
        """Returns the models that the server serves, the default one first."""
        with _client_errors(self.address):
            answer = self._direct_stub.ListModels(ListModelsRequest(), **self._defaults.options())
        return list(answer.models)

    def model(self, name: str = "") -> Model:
        """Returns one served model; the empty name means the default one."""
        with _client_errors(self.address):
            answer = self._direct_stub.GetModel(GetModelRequest(model=name), **self._defaults.options())
        served: Model = answer.model
        return served

    def versions(self, model: str = "") -> list[Version]:
        """Returns every version on the server's disk, of all models or of one, and whether it is served."""
        with _client_errors(self.address):
            answer = self._repository.ListVersions(
                ListVersionsRequest(model=model), **self._defaults.options()
            )
        return list(answer.versions)

    def load(self, model: str, version: str = "", *, timeout_seconds: float | None = None) -> Model:
        """Loads a version of a model, by default the newest, and waits until the server serves it."""
        with _client_errors(self.address):
            answer = self._repository.LoadModel(
                LoadModelRequest(model=model, version=version), **self._defaults.options(timeout_seconds)
            )
        loaded: Model = answer.model
        return loaded

    def unload(self, model: str) -> None:
        """Unloads a model: the server no longer serves it."""
        with _client_errors(self.address):
            self._repository.UnloadModel(UnloadModelRequest(model=model), **self._defaults.options())

    def health(self, service: str = "") -> str:
        """Returns `SERVING` or `NOT_SERVING` for the whole server, a service, or a model."""
        with _client_errors(self.address):
            answer = self._health.Check(
                health_pb2.HealthCheckRequest(service=service), **self._defaults.options()
            )
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return name

    def close(self) -> None:
        """Closes the connection, and cancels every call that uses it."""
        self._channel.close()
        self._direct.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pending:
    """A call under way, as `Client.submit` returns it."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address

    def result(self) -> GenerateResponse:
        """Waits for the answer and returns it."""
        with _client_errors(self._address):
            answer: GenerateResponse = self._call.result()
        return answer

    def outcome(self) -> GenerateResponse | ClientError:
        """Waits, and returns the answer or the error."""
        try:
            return self.result()
        except ClientError as error:
            return error

    def when_done(self, callback: Callable[[], None]) -> None:
        """Registers a callback, which a thread of gRPC calls when the answer or an error is there."""
        self._call.add_done_callback(lambda _: callback())

    def cancel(self) -> None:
        """Cancels the call; the server frees its slot."""
        self._call.cancel()


def _channel(address: str, tls: Tls | None, options: ChannelOptions) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options)


@contextmanager
def _client_errors(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.FutureCancelledError:
        raise ClientError("CANCELLED", "the caller cancelled") from None
    except grpc.RpcError as error:
        raise ClientError.from_rpc(error, address) from error
