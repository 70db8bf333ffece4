"""The client for programs without asyncio: every call blocks until its answer arrives."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from operator import attrgetter
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self

import grpc

from seq2seq_serve.client import rpcs
from seq2seq_serve.client.errors import ClientError, client_errors
from seq2seq_serve.client.files.memory import TranslationMemory
from seq2seq_serve.client.many import (
    DEFAULT_GIVE_UP_SECONDS,
    DEFAULT_IN_FLIGHT,
    NO_ANSWER,
    Dispatcher,
    PendingText,
)
from seq2seq_serve.client.rpcs import Answer, Connection, Outcome, Rpc, Translated, documented
from seq2seq_serve.client.wire import Item, item_maker
from seq2seq_serve.protos.options import Options, options_of
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse
from seq2seq_serve.protos.sources import Sources, check_texts

Arguments = ParamSpec("Arguments")


class Pending(Generic[Answer]):
    """A call in flight, as `Client.submit` returns it."""

    def __init__(self, rpc: Rpc[Answer], address: str) -> None:
        self._address = address
        self._send(rpc)

    def _send(self, rpc: Rpc[Answer]) -> None:
        self._rpc = rpc
        self._call = rpc.method.future(rpc.request, **rpc.settings)

    def result(self) -> Answer:
        """Waits for the answer and returns it."""
        outcome = self.outcome()
        if isinstance(outcome, ClientError) and outcome.may_be_by_health_check:
            self._send(self._rpc.directly)
            outcome = self.outcome()
        if isinstance(outcome, ClientError):
            raise outcome
        return outcome

    def outcome(self) -> Answer | ClientError:
        """Waits, and returns the answer or the error."""
        try:
            with client_errors(self._address):
                return self._rpc.read(self._call.result())
        except ClientError as error:
            return error

    def cancel(self) -> None:
        """Cancels the call; the server frees its slot."""
        self._call.cancel()


def _blocking(
    prepare: Callable[Concatenate[Connection, Arguments], Rpc[Answer]],
) -> Callable[Concatenate[Client, Arguments], Answer]:
    """Makes the method of `Client` that sends an RPC and waits for its answer."""

    def method(client: Client, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        return Pending(prepare(client, *args, **kwargs), client.address).result()

    return documented(method, prepare)


def _streaming(
    prepare: Callable[Concatenate[Connection, Arguments], Rpc[Answer]],
) -> Callable[Concatenate[Client, Arguments], Iterator[Answer]]:
    """Makes the method of `Client` that sends an RPC and yields its answers."""

    def method(client: Client, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Iterator[Answer]:
        rpc = prepare(client, *args, **kwargs)
        yield from rpc.first
        for each in (rpc, rpc.directly):
            call = each.method(each.request, **each.settings)
            try:
                with client_errors(client.address):
                    yield from map(each.read, call)
                return
            except ClientError as error:
                if not error.may_be_by_health_check or each is not rpc:
                    raise
            finally:
                call.cancel()

    return documented(method, prepare, "Iterator[{}]")


class Client(Connection):
    """A connection to a server, for any number of threads. Use it as a context manager, or close it.

    Every method raises `ClientError` if the call fails, and `ValueError` for a text that cannot be sent.

    Args:
        address: `host:port`.
        timeout_seconds: Deadline of a call that sets none; None waits forever.
        tls: Files for an encrypted connection; None does not encrypt.
        token: Identifies the caller to a server that requires it. Without TLS it is sent in the clear.

    Raises:
        OSError: A file of `tls` cannot be read.
    """

    _grpc: ClassVar[ModuleType] = grpc

    translate = _blocking(rpcs.translate)
    generate = _blocking(rpcs.generate)
    stream = _streaming(rpcs.stream)
    generate_batch = _streaming(rpcs.generate_batch)
    score = _blocking(rpcs.score)
    models = _blocking(rpcs.models)
    model = _blocking(rpcs.model)
    versions = _blocking(rpcs.versions)
    load = _blocking(rpcs.load)
    unload = _blocking(rpcs.unload)
    health = _blocking(rpcs.health)

    def submit(
        self,
        source: Sources,
        *,
        model: str = "",
        options: Options | None = None,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> Pending[GenerateResponse]:
        """Sends the request of `generate` without waiting. For many texts, use `translate_many`."""
        rpc = rpcs.generate(
            self, source, model=model, options=options, timeout_seconds=timeout_seconds, request_id=request_id
        )
        return Pending(rpc, self.address)

    def translate_many(
        self,
        texts: Iterable[Sources],
        *,
        model: str = "",
        options: Options | None = None,
        in_flight: int = DEFAULT_IN_FLIGHT,
        give_up_seconds: float = DEFAULT_GIVE_UP_SECONDS,
        timeout_seconds: float | None = None,
        memory: TranslationMemory | None = None,
    ) -> Iterator[Translated]:
        """Yields the targets of many texts in order, each as soon as it and all before it are done.

        If a text fails, or an item is not a text (None, NaN), its result has the error, and the client
        continues with the others. A blank text has an empty target; as one of several sources it is an error.
        If an overloaded server refuses a call, the client repeats it after the server's retry delay, with
        fewer texts in flight. If the server restarts, the client waits for it.

        Args:
            texts: Texts, or other sources as `generate` takes them. May be endless or slow: a thread reads
                them, at most some hundred ahead.
            model: The model's name; empty means the server's first model.
            options: The options of every text: a message, or values by name such as {"beam_size": 4}.
            in_flight: The maximum number of texts in flight.
            give_up_seconds: How long to continue while the server does not answer any call.
            timeout_seconds: Deadline of each text, from the time at which it is sent.
            memory: Translations, such as those of `read_memory`: its texts are answered without a call.

        Raises:
            ClientError: The server did not answer for `give_up_seconds`, refuses all calls (for example for
                a missing token), or failed several texts in a row. The results so far have been yielded.
            TypeError: `texts` is a single source.
        """
        check_texts(texts)
        prepare = item_maker(model, options_of(options))
        dispatcher = Dispatcher(prepare, in_flight, give_up_seconds, memory, attrgetter("kind"))
        rpc_of = partial(self._rpc_of_items, model=model, timeout_seconds=timeout_seconds)
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

        calls: set[Any] = set()  # in flight

        def read_answers(call: Any, rpc: Rpc[list[Outcome]], sent: list[PendingText[Item]]) -> None:
            unanswered = dict(enumerate(sent))
            error: Exception = NO_ANSWER
            try:
                with client_errors(self.address):
                    for message in [call.result()] if len(sent) == 1 else call:
                        for place, outcome in rpc.read(message):
                            events.put(partial(dispatcher.end, unanswered.pop(place), outcome))
            except Exception as raised:
                error = raised
            for text in unanswered.values():
                events.put(partial(dispatcher.end, text, error, is_shared=len(sent) > 1))
            events.put(partial(calls.discard, call))

        def send(sent: list[PendingText[Item]]) -> None:
            rpc = rpc_of([text.to_send for text in sent])
            start = rpc.method.future if len(sent) == 1 else rpc.method
            call = start(rpc.request, **rpc.settings)
            calls.add(call)
            if len(sent) == 1:
                call.add_done_callback(partial(read_answers, rpc=rpc, sent=sent))
            else:
                threading.Thread(target=read_answers, args=(call, rpc, sent), daemon=True).start()

        # A daemon thread, so that Ctrl-C ends a program that waits for input.
        threading.Thread(target=read, daemon=True).start()
        try:
            while not dispatcher.is_over:
                for sent in dispatcher.next_calls():
                    send(sent)
                with suppress(queue.Empty):
                    events.get(timeout=dispatcher.seconds_to_wait())()
                while not events.empty():
                    events.get()()
                for result in dispatcher.results():
                    yield result
                    room.release()
        finally:
            has_left.set()
            room.release()
            for call in calls:
                call.cancel()
        if dispatcher.error is not None:
            raise dispatcher.error

    def close(self) -> None:
        """Closes the connection and cancels its calls."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
