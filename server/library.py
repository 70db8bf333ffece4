"""Models in a program of one's own: the server's engine without gRPC, a port or the program's event loop.

from seq2seq_serve import load

with load("bundles/demo") as model:
print(model.translate(["나는 학생이다", "오늘은 금요일 입니다"], beam_size=4))
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

from seq2seq_serve.bundle.names import Form
from seq2seq_serve.bundle.normalization import is_blank
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.options import options_of
from seq2seq_serve.protos.sources import Sources, TextOrIds, check_texts, sources_of, target_of
from seq2seq_serve.server.config import QueueLimits, RunnerConfig, ServerConfig
from seq2seq_serve.server.errors import InvalidRequest, Unavailable
from seq2seq_serve.server.models.loading import load_model
from seq2seq_serve.server.service.call import Call
from seq2seq_serve.server.service.read.options import Decoding, read_options, read_target
from seq2seq_serve.server.service.seq2seq.generation import Write, generate, score
from seq2seq_serve.server.service.write.responses import model_message
from seq2seq_serve.server.settings import override, settings_of, values_of
from seq2seq_serve.server.telemetry.record import ADMIN, Caller

_Result = TypeVar("_Result")

_PER_SLOT = 2  # sources that are decoded or wait at once: enough that no slot waits for one
_UNBOUNDED = QueueLimits(2**40, 2**40)
_ADMIN = Caller("", frozenset({ADMIN}))


class AsyncModel:
    """One model, used on the event loop on which it was started.

    Args:
        bundle: The folder of a bundle.
        runner: Settings of its engine.

    Raises:
        ValueError: The bundle cannot be used, or not on this machine; the message names it.
    """

    def __init__(self, bundle: Path, runner: RunnerConfig) -> None:
        config = ServerConfig(runner=runner, queue=_UNBOUNDED, log_level="warning")
        self._model = load_model(bundle, config, bundle.name)
        self._count = 0

    async def start(self) -> None:
        """Build the engine and wait until it is warm; raises ValueError if it cannot be built."""
        await self._model.engine.start()

    async def stop(self) -> None:
        """End the engine; unfinished requests raise `Unavailable`."""
        await self._model.engine.stop()

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

    def read_options(self, options: pb.GenerateOptions, *, stream: bool = False) -> Decoding:
        """Returns how targets are decoded; raises InvalidRequest if an option does not fit."""
        return read_options(options, self._model, _ADMIN, stream=stream)

    async def generate(
        self, sources: list[pb.Source], decoding: Decoding, write: Write | None = None
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

    async def score(self, message: pb.ScoreRequest) -> pb.ScoreResponse:
        """Returns the log-probabilities of a given target; raises as `generate`."""
        return await score(message.sources, read_target(message, self._model, _ADMIN), self._call())

    def _call(self) -> Call:
        self._count += 1
        return Call(request_id=str(self._count), caller=_ADMIN)


class Model:
    """One model in this process, for programs without an event loop; `load` creates it.

    Its methods may be called on any thread. Options are those of `seq2seq.v1.GenerateOptions`, such as
    `beam_size=4`; `docs/protocols.md` lists them. A source is a text, a list of token ids, the bytes of a
    file, an array, or several of these by the names of the model's sources.

    Attributes:
        description: Sizes, limits and sources of the model, as a server reports them.
    """

    def __init__(self, bundle: Path, runner: RunnerConfig) -> None:
        self._model = AsyncModel(bundle, runner)
        self.description = self._model.description
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="seq2seq-serve", daemon=True)
        self._thread.start()
        try:
            self._run(self._model.start()).result()
        except BaseException:
            self._end()
            raise

    def generate(self, sources: Iterable[Sources], **options: Any) -> Iterator[pb.GenerateResponse]:
        """Yields the whole answer to each source, in order; up to `max_slots` are decoded at once.

        Answers have hypotheses with scores, and log-probabilities, attention or times if the options request
        them. The sources may be endless: only a few are read ahead.

        Raises:
            InvalidRequest: A source or an option does not fit; the message names it and the expected value.
            ServerError: The engine failed.
            TypeError: There is no such option, or a source is of a type that cannot be read.
        """
        return self._answers(enumerate(sources), self._model.read_options(_options(options)))

    def translate(self, texts: Iterable[Sources], **options: Any) -> list[str]:
        """Returns the best target of each text, in order, "" for a blank one; raises as `generate`."""
        check_texts(texts)
        given = list(texts)
        is_blank_at = [isinstance(text, str) and is_blank(text) for text in given]
        rest = ((place, text) for place, text in enumerate(given) if not is_blank_at[place])
        answers = self._answers(rest, self._model.read_options(_options(options)))
        return ["" if is_empty else next(answers).hypotheses[0].text for is_empty in is_blank_at]

    def stream(self, source: Sources, **options: Any) -> Iterator[str]:
        """Yields the best target in pieces of whole characters as they are decoded; raises as `generate`."""
        decoding = self._model.read_options(_options(options), stream=True)
        if decoding.request.num_hypotheses > 1:
            raise InvalidRequest(
                "a stream has one hypothesis: leave num_hypotheses out, or call generate",
                field="options.num_hypotheses",
            )
        pieces = SimpleQueue[str | None]()  # and None after the last one

        async def write(piece: pb.Piece) -> None:
            if piece.hypothesis == 0:
                pieces.put(piece.text)

        answering = self._run(self._model.generate(sources_of(source), decoding, write))
        answering.add_done_callback(lambda _: pieces.put(None))
        try:
            while (text := pieces.get()) is not None:
                yield text
            answering.result()
        finally:
            answering.cancel()

    def score(self, source: Sources, target: TextOrIds, **options: Any) -> pb.ScoreResponse:
        """Returns the log-probability of each token of a given target, its end included.

        Args:
            source: The source.
            target: A text or token ids.
            options: `source_language`, `target_language` and `task`, for models that choose by them.
        """
        message = pb.ScoreRequest(sources=sources_of(source), target=target_of(target), **options)
        return self._run(self._model.score(message)).result()

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
        """End the engine; unfinished calls on other threads raise `Unavailable`."""
        if self._thread.is_alive():
            self._run(self._model.stop()).result()
            self._end()

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
    ) -> Iterator[pb.GenerateResponse]:
        """Yields the answers to sources with their numbers, which are in the texts of errors."""
        pending: deque[tuple[int, Future[pb.GenerateResponse]]] = deque()
        try:
            for number, source in numbered:
                pending.append((number, self._begin(source, decoding)))
                if len(pending) >= _PER_SLOT * self._model.num_slots:
                    yield _answered(*pending.popleft())
            while pending:
                yield _answered(*pending.popleft())
        finally:
            for _, future in pending:
                future.cancel()

    def _begin(self, source: Sources, decoding: Decoding) -> Future[pb.GenerateResponse]:
        try:
            given = sources_of(source)
        except (TypeError, ValueError) as error:  # raised in its turn, after the answers before it
            failed: Future[pb.GenerateResponse] = Future()
            failed.set_exception(error)
            return failed
        return self._run(self._model.generate(given, decoding))

    def _best(self, source: Sources, options: Mapping[str, Any]) -> str:
        [answer] = self.generate([source], **options)
        return answer.hypotheses[0].text

    def _run(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        if self._loop.is_closed():
            work.close()
            raise Unavailable("the model was closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def load(bundle: Path | str, **settings: Any) -> Model:
    """Loads a bundle, and waits until it is warm.

    Args:
        bundle: A folder that `python -m export` has written.
        settings: Those of `python -m server` for an engine, by the names of their flags: `precision="int8"`,
            `instances=2`, `threads=4`, `memory_budget="512MiB"`, `provider="cpu"`; None is the default.

    Raises:
        ValueError: The bundle cannot be used, or not on this machine, or there is no such setting.
    """
    config = RunnerConfig()
    given = {name: value for name, value in settings.items() if value is not None}
    values = values_of(given, list(settings_of(config)), "load: ")
    return Model(Path(bundle), override(config, values))


def _content(source: Sources | Path) -> Sources:
    return Path(source).read_bytes() if isinstance(source, str | Path) else source


def _answered(number: int, future: Future[pb.GenerateResponse]) -> pb.GenerateResponse:
    try:
        return future.result()
    except InvalidRequest as error:
        raise type(error)(f"source {number}: {error}", field=error.field) from error
    except TypeError as error:
        raise TypeError(f"source {number}: {error}") from error
    except ValueError as error:
        reason = str(error)
        if isinstance(error, UnicodeEncodeError):
            reason = f"not valid UTF-8 at character {error.start + 1}"
        raise InvalidRequest(f"source {number}: {reason}", field="sources") from error


def _options(options: Mapping[str, Any]) -> pb.GenerateOptions:
    try:
        return options_of(options)
    except ValueError as error:
        raise InvalidRequest(str(error), field="options") from None
