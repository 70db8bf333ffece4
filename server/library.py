"""Models in a program of one's own: the server's engine without gRPC, a port or the program's event loop.

from seq2seq_serve import load

with load("bundles/demo") as model:
print(model.translate(["나는 학생이다", "오늘은 금요일 입니다"], beam_size=4))

with load("bundles/ko-en", adapters={"legal": "adapters/legal"}) as model:
print(model.translate(["계약을 해지한다"], adapter="legal"))
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

from seq2seq_serve.bundle.adapters import load_adapter
from seq2seq_serve.bundle.characters import is_blank
from seq2seq_serve.bundle.names import Form
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.options import options_of
from seq2seq_serve.protos.sources import Sources, TextOrIds, check_texts, sources_of, target_of
from seq2seq_serve.server.config import QueueLimits, RunnerConfig, ServerConfig
from seq2seq_serve.server.errors import InvalidRequest, Unavailable, UnknownModel
from seq2seq_serve.server.models.adapters import check_fits
from seq2seq_serve.server.models.loading import load_model
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.call import Call
from seq2seq_serve.server.service.read.options import Decoding, read_options, read_target
from seq2seq_serve.server.service.read.terms import Glossary
from seq2seq_serve.server.service.seq2seq.generation import WritePiece, generate, score
from seq2seq_serve.server.service.write.responses import model_message
from seq2seq_serve.server.settings import override, settings_of, values_of
from seq2seq_serve.server.telemetry.record import ADMIN, Caller

_Result = TypeVar("_Result")

_PER_SLOT = 2  # sources that are decoded or wait at once: enough that no slot waits for one
_UNBOUNDED = QueueLimits(2**40, 2**40)
_NO_ADAPTERS: Mapping[str, Any] = {}
_ADMIN = Caller("", frozenset({ADMIN}))


class AsyncModel:
    """One model, used on the event loop on which it was started; it is stopped at the end of `asyncio.run`.

    On another loop, and in a process that was forked later, its methods raise `Unavailable`.

    Args:
        bundle: The folder of a bundle.
        runner: Settings of its engine.
        adapters: Folders of adapters by the names with which requests ask for them.

    Raises:
        ValueError: The bundle or an adapter cannot be used, or not on this machine; the message names it.
    """

    def __init__(
        self, bundle: Path, runner: RunnerConfig, adapters: Mapping[str, Path] = _NO_ADAPTERS
    ) -> None:
        loaded = {name: load_adapter(path) for name, path in adapters.items()}
        if loaded:
            max_rank = max(adapter.manifest.rank for adapter in loaded.values())
            runner = replace(runner, has_adapters=True, max_adapters=len(loaded), max_rank=max_rank)
        config = ServerConfig(runner=runner, queue=_UNBOUNDED, log_level="warning")
        self._model = model = load_model(bundle, config, bundle.name)
        self._models = {"": model}
        for place, (name, adapter) in enumerate(loaded.items()):
            check_fits(adapter.manifest, adapter.path, model.name, model.manifest, model.sizing.max_rank)
            model.engine.write_adapter(place, adapter.weights)
            self._models[name] = model.adapted(f"{bundle.name}/{name}", adapter, place)
        self._count = 0
        self._process_id = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None  # on which it was started
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Build the engine and wait until it is warm, once.

        Raises:
            ValueError: It cannot be built, or was started before.
        """
        if self._loop is not None:
            raise ValueError("the model was started before: make another AsyncModel for another event loop")
        self._loop = asyncio.get_running_loop()
        await self._model.engine.start()
        self._keeping = asyncio.create_task(self._keep())
        await asyncio.sleep(0)  # it begins to wait

    async def stop(self) -> None:
        """End the engine; unfinished requests raise `Unavailable`."""
        if self._loop is not None:
            self._check_place()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})

    @property
    def num_slots(self) -> int:
        """The number of sequences that are decoded at once."""
        return self._model.engine.num_slots

    @property
    def description(self) -> pb.Model:
        """The message with which a server describes the model."""
        return model_message(self._model)

    def problem(self) -> str | None:
        """Returns why nothing is decoded at present, or None."""
        return self._model.engine.problem()

    def read_options(
        self,
        options: pb.GenerateOptions,
        *,
        adapter: str | None = None,
        stream: bool = False,
        glossary: Glossary | None = None,
    ) -> Decoding:
        """Returns how targets are decoded.

        Args:
            options: The options.
            adapter: The name of an adapter; None for none.
            stream: Whether targets come in pieces.
            glossary: As for `server.service.read.options.read_options`.

        Raises:
            InvalidRequest: An option does not fit.
            UnknownModel: There is no adapter of that name.
        """
        return read_options(options, self._named(adapter), _ADMIN, stream=stream, glossary=glossary)

    async def generate(
        self, sources: list[pb.Source], decoding: Decoding, write: WritePiece | None = None
    ) -> pb.GenerateResponse:
        """Returns the targets of one source; other tasks may decode theirs at the same time.

        Args:
            sources: The source, in its parts if the model has several.
            decoding: From `read_options`.
            write: Is called with each piece of the targets when it is decoded.

        Raises:
            InvalidRequest: The source does not fit; the message names it and the expected value.
            ServerError: The engine failed.
        """
        [answer] = await generate([sources], decoding, self._call(), write)
        return answer

    async def score(self, message: pb.ScoreRequest, *, adapter: str | None = None) -> pb.ScoreResponse:
        """Returns the log-probabilities of a given target; raises as `read_options` and `generate`."""
        return await score(message.sources, read_target(message, self._named(adapter), _ADMIN), self._call())

    def _named(self, adapter: str | None) -> ServedModel:
        if (adapter or "") not in self._models:
            names = ", ".join(filter(None, self._models)) or "none"
            raise UnknownModel(
                f"no adapter is named {adapter!r}: this model has {names}", name=adapter or "", version=""
            )
        return self._models[adapter or ""]

    def check_process(self) -> None:
        """Raises Unavailable in a process that was forked from that of the model, whose threads it lacks."""
        if os.getpid() != self._process_id:
            raise Unavailable(
                "this process was forked after the model was loaded, and does not have the model's threads: "
                "load the model in this process, or start it with the method 'spawn'"
            )

    async def _keep(self) -> None:
        """Wait until this task is cancelled, by `stop` or at the end of `asyncio.run`, and end the engine."""
        try:
            await asyncio.Event().wait()
        finally:
            await self._model.engine.stop()

    def _check_place(self) -> None:
        self.check_process()
        if self._loop is None:
            raise Unavailable("the model was not started: await its method start first")
        if self._loop is not asyncio.get_running_loop():
            raise Unavailable(
                "the model was started on another event loop, and only works there: start another AsyncModel "
                "on this one, or use seq2seq_serve.load, whose models work on all threads"
            )

    def _call(self) -> Call:
        self._check_place()
        self._count += 1
        return Call(request_id=str(self._count), caller=_ADMIN)


class Model:
    """One model in this process, for programs without an event loop; `load` creates it.

    Its methods may be called on any thread. Options are those of `seq2seq.v1.GenerateOptions`, such as
    `beam_size=4`; `docs/protocols.md` lists them; `adapter` names one of the model's adapters. A source is a
    text, a list of token ids, the bytes of a file, an array, or several of these by the names of the model's
    sources.

    Attributes:
        description: Sizes, limits and sources of the model, as a server reports them.
    """

    def __init__(
        self, bundle: Path, runner: RunnerConfig, adapters: Mapping[str, Path] = _NO_ADAPTERS
    ) -> None:
        self._model = AsyncModel(bundle, runner, adapters)
        self.description = self._model.description
        self._thread = _LoopThread(self._model)
        # A model that nobody has closed, and nobody can use any more
        weakref.finalize(self, self._thread.begin_closing).atexit = False
        self._thread.start()

    def generate(
        self, sources: Iterable[Sources], *, adapter: str | None = None, **options: Any
    ) -> Iterator[pb.GenerateResponse]:
        """Yields the whole answer to each source, in order; up to `max_slots` are decoded at once.

        Answers have hypotheses with scores, and log-probabilities, attention or times if the options request
        them. The sources may be endless: only a few are read ahead.

        Raises:
            InvalidRequest: A source or an option does not fit; the message names it and the expected value.
            UnknownModel: There is no adapter of that name.
            ServerError: The engine failed.
            TypeError: There is no such option, or a source is of a type that cannot be read.
        """
        return self._answers(enumerate(sources), self._decoding(options, adapter))

    def translate(self, texts: Iterable[Sources], *, adapter: str | None = None, **options: Any) -> list[str]:
        """Returns the best target of each text, in order, "" for a blank one; raises as `generate`."""
        check_texts(texts)
        given = list(texts)
        is_blank_at = [isinstance(text, str) and is_blank(text) for text in given]
        rest = ((place, text) for place, text in enumerate(given) if not is_blank_at[place])
        with closing(self._answers(rest, self._decoding(options, adapter))) as answers:
            return ["" if is_empty else next(answers).hypotheses[0].text for is_empty in is_blank_at]

    def stream(self, source: Sources, *, adapter: str | None = None, **options: Any) -> Iterator[str]:
        """Yields the best target in pieces of whole characters as they are decoded; raises as `generate`."""
        decoding = self._decoding(options, adapter, stream=True)
        if decoding.request.num_hypotheses > 1:
            raise InvalidRequest(
                "a stream has one hypothesis: leave num_hypotheses out, or call generate",
                field="options.num_hypotheses",
            )
        pieces = SimpleQueue[str | None]()  # and None after the last one

        async def write(piece: pb.Piece) -> None:
            if piece.hypothesis == 0:
                pieces.put(piece.text)

        future: Future[pb.GenerateResponse] = Future()
        future.add_done_callback(lambda _: pieces.put(None))
        try:
            self._thread.begin(future, partial(self._model.generate, sources_of(source), decoding, write))
            while (text := self._thread.wait(pieces.get)) is not None:
                yield text
            future.result()
        finally:
            self._thread.cancel(future)

    def score(
        self, source: Sources, target: TextOrIds, *, adapter: str | None = None, **options: Any
    ) -> pb.ScoreResponse:
        """Returns the log-probability of each token of a given target, its end included.

        Args:
            source: The source.
            target: A text or token ids.
            adapter: The name of one of the model's adapters.
            options: `source_language`, `target_language` and `task`, for models that choose by them.
        """
        message = pb.ScoreRequest(sources=sources_of(source), target=target_of(target), **options)
        future: Future[pb.ScoreResponse] = Future()
        try:
            self._thread.begin(future, partial(self._model.score, message, adapter=adapter))
            return self._thread.wait(future.result)
        finally:
            self._thread.cancel(future)

    def caption(self, picture: Sources | Path, **options: Any) -> str:
        """Returns the caption of a picture or a clip: a path, the bytes of a file, or an array."""
        self._check_form("a picture", Form.PICTURE, Form.CLIP, Form.FEATURES)
        return self._best(_content(picture), options)

    def transcribe(self, sound: Sources | Path, **options: Any) -> str:
        """Returns the transcript of a sound: a path, the bytes of a file, or its log-mel spectrogram."""
        self._check_form("a sound", Form.SOUND)
        return self._best(_content(sound), options)

    def answer(self, story: str, question: str, **options: Any) -> str:
        """Returns the answer to a question about a story."""
        names = {form: name for name, form in self.description.sources.items()}
        try:
            sources = {names[Form.SENTENCES]: story, names[Form.TEXT]: question}
        except KeyError:
            text = f"{self.description.name} takes {', '.join(sorted(names))}, not a story and a question"
            raise InvalidRequest(text, field="sources") from None
        return self._best(sources, options)

    def close(self) -> None:
        """End the engine; unfinished calls on other threads raise `Unavailable`.

        It may be called again. A model that is not closed ends when it is garbage, or with the program.
        """
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_form(self, what: str, *forms: Form) -> None:
        its_forms = self.description.sources.values()
        if not set(forms).intersection(its_forms):
            text = f"{self.description.name} takes {', '.join(sorted(its_forms))}, not {what}"
            raise InvalidRequest(text, field="sources")

    def _answers(
        self, numbered: Iterable[tuple[int, Sources]], decoding: Decoding
    ) -> Generator[pb.GenerateResponse]:
        """Yields the answers to sources with their numbers, which are in the texts of errors."""
        pending: deque[tuple[int, Future[pb.GenerateResponse]]] = deque()

        def first() -> pb.GenerateResponse:
            answer = self._answered(*pending[0])
            pending.popleft()  # afterwards: an interrupt must find it
            return answer

        try:
            for number, source in numbered:
                pending.append((number, Future()))
                self._begin(pending[-1][1], source, decoding)
                if len(pending) >= _PER_SLOT * self._model.num_slots:
                    yield first()
            while pending:
                yield first()
        finally:
            for _, future in pending:
                self._thread.cancel(future)

    def _begin(self, future: Future[pb.GenerateResponse], source: Sources, decoding: Decoding) -> None:
        try:
            given = sources_of(source)
        except (TypeError, ValueError) as error:  # raised in its turn, after the answers before it
            future.set_exception(error)
        else:
            self._thread.begin(future, partial(self._model.generate, given, decoding))

    def _answered(self, number: int, future: Future[pb.GenerateResponse]) -> pb.GenerateResponse:
        try:
            return self._thread.wait(future.result)
        except InvalidRequest as error:
            raise type(error)(f"source {number}: {error}", field=error.field) from error
        except TypeError as error:
            raise TypeError(f"source {number}: {error}") from error
        except ValueError as error:
            reason = str(error)
            if isinstance(error, UnicodeEncodeError):
                reason = f"not valid UTF-8 at character {error.start + 1}"
            raise InvalidRequest(f"source {number}: {reason}", field="sources") from error

    def _decoding(self, options: Mapping[str, Any], adapter: str | None, *, stream: bool = False) -> Decoding:
        return self._model.read_options(_options(options), adapter=adapter, stream=stream)

    def _best(self, source: Sources, options: Mapping[str, Any]) -> str:
        [answer] = self.generate([source], **options)
        return answer.hypotheses[0].text


class _LoopThread:
    """The thread of a `Model`, with the event loop on which its `AsyncModel` runs.

    Owned by the model; used on all threads. It ends when it is closed, or with the program. A call that waits
    while the program ends, on a daemon thread, waits for ever, as Python's own calls do.
    """

    def __init__(self, model: AsyncModel) -> None:
        self._model = model
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._lock = threading.Lock()  # of `_is_closing`
        self._is_closing = False
        self._is_exiting = False
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="seq2seq-serve", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until the engine is warm; raises ValueError if it cannot be built."""
        # The interpreter aborts if it ends while a thread is inside of C++ or Rust.
        atexit.register(self._exit)
        try:
            self._thread.start()
            self._started.result()
        except BaseException:
            self.begin_closing()
            raise
        atexit.unregister(self._exit)
        atexit.register(self._exit)  # it comes before that of the core, which would report to callers

    def begin(self, future: Future[_Result], work: Callable[[], Coroutine[Any, Any, _Result]]) -> None:
        """Begin work on the loop.

        Args:
            future: Gets its result. The caller has it before, so that `cancel` also ends work whose caller is
                interrupted in here.
            work: Makes the coroutine, on the loop.

        Raises:
            Unavailable: The model was closed, or this process was forked from its.
        """

        def finish(task: asyncio.Task[_Result]) -> None:
            error = Unavailable("the model was closed") if task.cancelled() else task.exception()
            if self._is_exiting or not future.set_running_or_notify_cancel():
                return
            if error is None:
                future.set_result(task.result())
            else:
                future.set_exception(error)

        def end(task: asyncio.Task[_Result], future: Future[_Result]) -> None:
            if future.cancelled():
                self._loop_runs(task.cancel)

        def start() -> None:
            if not future.cancelled():
                task = self._loop.create_task(work())
                task.add_done_callback(finish)
                future.add_done_callback(partial(end, task))

        self._model.check_process()
        with self._lock:
            if not self._is_closing:
                self._loop.call_soon_threadsafe(start)
            elif not (self._is_exiting and threading.current_thread().daemon):
                raise Unavailable("the model was closed")

    def wait(self, get: Callable[[], _Result]) -> _Result:
        """Returns what `get` returns when the loop has it; raises Unavailable in a forked process."""
        self._model.check_process()
        return get()

    def cancel(self, future: Future[Any]) -> None:
        """End work that may have begun, unless it has ended."""
        with suppress(Unavailable):  # a lock that a thread held at the fork is never free
            self.wait(future.cancel)

    def begin_closing(self) -> None:
        """End the engine, and then the thread; does not wait."""
        with suppress(Unavailable):
            self._model.check_process()
            with self._lock:
                self._is_closing = True
            self._loop_runs(self._closing.set)

    def close(self) -> None:
        """End the engine and the thread."""
        self.begin_closing()
        if self._thread.is_alive():  # not in a forked process
            self._thread.join()

    def _exit(self) -> None:
        self._is_exiting = True
        self.close()

    def _loop_runs(self, action: Callable[[], object]) -> None:
        """Lets the loop run an action, unless it is closed: then all has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)

    def _run(self) -> None:
        with closing(self._loop):
            try:
                self._loop.run_until_complete(self._serve())
            finally:
                self._loop.run_until_complete(self._end_tasks())
        atexit.unregister(self._exit)

    async def _serve(self) -> None:
        try:
            await self._model.start()
        except BaseException as error:
            self.begin_closing()
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        await self._closing.wait()
        await self._model.stop()

    async def _end_tasks(self) -> None:
        await asyncio.sleep(0)  # all that has begun is a task now
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


def load(bundle: Path | str, *, adapters: Mapping[str, Path | str] = _NO_ADAPTERS, **settings: Any) -> Model:
    """Loads a bundle, and waits until it is warm.

    Args:
        bundle: A folder that `python -m export` has written.
        adapters: Folders that `python -m export adapter` has written, by names of one's own.
        settings: Those of `python -m server` for an engine, by the names of their flags: `precision="int8"`,
            `instances=2`, `threads=4`, `max_slots_size="512MiB"`, `provider="cpu"`; None is the default.

    Raises:
        ValueError: The bundle or an adapter cannot be used, or not on this machine, or there is no such
            setting.
    """
    config = RunnerConfig()
    given = {name: value for name, value in settings.items() if value is not None}
    values = values_of(given, list(settings_of(config)), "load: ")
    paths = {name: Path(folder) for name, folder in adapters.items()}
    return Model(Path(bundle), override(config, values), paths)


def _content(source: Sources | Path) -> Sources:
    return Path(source).read_bytes() if isinstance(source, str | Path) else source


def _options(options: Mapping[str, Any]) -> pb.GenerateOptions:
    try:
        return options_of(options)
    except ValueError as error:
        raise InvalidRequest(str(error), field="options") from None
