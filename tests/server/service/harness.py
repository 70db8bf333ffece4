"""A whole server around a runner that echoes its source, for tests that talk gRPC to it."""

from __future__ import annotations

import asyncio
import hashlib
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from grpc import aio
from tokenizers import decoders, models, pre_tokenizers, processors

from seq2seq_serve.bundle.manifest import (
    Bundle,
    FileSpec,
    Generation,
    GraphSpec,
    LengthBound,
    LengthRule,
    Manifest,
    Parity,
    SpecialIds,
    TensorSpec,
    TokenTemplate,
    Variant,
)
from seq2seq_serve.bundle.names import SOURCE_IDS, Axis, Form, Precision, Role, Verb
from seq2seq_serve.bundle.normalization import Normalization, normalizer
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub
from seq2seq_serve.server.app import App
from seq2seq_serve.server.config import RunnerConfig, ServerConfig
from seq2seq_serve.server.engine.async_engine import AsyncEngine, Stream
from seq2seq_serve.server.engine.core import Core
from seq2seq_serve.server.engine.plan import Branches, Move, Selected
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import Turn
from seq2seq_serve.server.engine.state import Sequence as Row
from seq2seq_serve.server.models.cores import ThreadCore
from seq2seq_serve.server.models.loading import load_model
from seq2seq_serve.server.models.served import Models, ServedModel
from seq2seq_serve.server.runner.sizing import Sizing
from seq2seq_serve.server.service.access import Access
from seq2seq_serve.server.service.calls import Calls
from seq2seq_serve.server.telemetry.metrics import Metrics
from tests.server.fakes import sample_value, selected

_Server = TypeVar("_Server")

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
PAD, BOS, EOS = 0, 1, 2
_IDS = TensorSpec(SOURCE_IDS, "int64", (Axis.BATCH, Axis.SOURCE_LENGTH), Role.SOURCE)
_FILE = FileSpec("none", "", 0)


def byte_tokenizer(normalization: Normalization = "none") -> Tokenizer:
    """One token a byte, so that most tokens of a Korean text end inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.add_special_tokens(list(SPECIAL_TOKENS))
    inner.normalizer = normalizer(normalization)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return Tokenizer(inner)


@dataclass
class EchoRunner:
    """Answers every source with itself.

    Attributes:
        gate: A step waits until this is set: clear it to hold the engine in a step.
        stepping: Set when a step begins.
        error: Raised by the next steps while it is set.
        length_bound: Of the model that it runs.
        generation: Of that model.
    """

    num_slots: int = 4
    max_source_length: int = 64
    repeats_steps: bool = False
    max_target_length: int = 64
    start_ids: tuple[int, ...] = (BOS,)
    eos_ids: tuple[int, ...] = (EOS,)
    has_decode: bool = True
    shares_memory: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    stepping: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    length_bound: LengthBound | None = None
    generation: Generation = field(default_factory=Generation)

    def __post_init__(self) -> None:
        self.gate.set()

    def warm_up(self) -> None:
        """Nothing to do."""

    def encode(self, first_row: int, requests: list[Request]) -> None:
        """Nothing to keep: a step looks at the request."""

    def prefill(self, first_row: int, sequences: tuple[Row, ...]) -> list[list[float]]:
        """Nothing to fill: a step looks at the target. A token's score is its id, negative."""
        return [
            [-float(token) for token in (*row.token_ids, EOS)] if row.request.is_score else []
            for row in sequences
        ]

    def step(self, rows: tuple[Row, ...], num_steps: int = 1) -> Selected:
        self.stepping.set()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        tokens = [self._next(row.request.sources[SOURCE_IDS], len(row.token_ids)) for row in rows]
        branches, wanted = {}, {}
        for i, row in enumerate(rows):
            ways = ((tokens[i], -0.5), (EOS, -1.5), (BOS, -2.5))
            if not row.is_plain:
                ids, log_probabilities = zip(*ways[: row.num_branches], strict=True)
                alternatives = ways[: row.request.num_alternatives]
                branches[i] = Branches(list(ids), list(log_probabilities), alternatives)
            if row.progress is not None:
                wanted[i] = dict.fromkeys(row.request.terms.wanted(row.progress), -3.5)
        return selected(rows, tokens, branches, wanted=wanted)

    def move(self, moves: Iterable[Move]) -> int:
        return 100 * len(list(moves))

    def align(
        self,
        row: int,
        first_position: int,
        target_ids: tuple[int, ...],
        memory_length: int,
        adapter: int = -1,
    ) -> np.ndarray[Any, Any]:
        """Every target token attends to the source token that it repeats."""
        return np.eye(len(target_ids), memory_length, first_position, dtype=np.float32)

    def close(self) -> None:
        """Nothing to do."""

    def _next(self, source: np.ndarray[Any, Any], position: int) -> int:
        return int(source[position]) if position < len(source) else EOS


class Turns:
    """How many requests the engines have taken and ended, and an event whenever that changes."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.requests: list[Request] = []
        self.num_ended = 0
        self._changed = asyncio.Event()

    @property
    def num_submitted(self) -> int:
        return len(self.requests)

    def note(self, turn: Turn) -> None:
        self.num_ended += sum(update.result is not None for update in turn.updates)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class _CountingEngine(AsyncEngine):
    """An engine that says when it took requests."""

    turns: Turns

    @contextmanager
    def submitted(
        self,
        requests: Sequence[Request],
        is_expired: Callable[[], bool] = lambda: False,
        *,
        is_accepted: bool = False,
    ) -> Iterator[list[Stream]]:
        with super().submitted(requests, is_expired, is_accepted=is_accepted) as streams:
            self.turns.requests += requests
            self.turns._changed.set()
            yield streams


@dataclass
class Served:
    """A running server and a way to talk to it."""

    app: App
    runners: dict[str, EchoRunner]
    turns: Turns
    channel: aio.Channel
    stub: Any

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.app.endpoint.port}"

    @property
    def runner(self) -> EchoRunner:
        return next(iter(self.runners.values()))

    @property
    def model(self) -> ServedModel:
        return next(iter(self.app.models))

    async def http(self, path: str) -> tuple[int, str]:
        """Status and text of a page of the metrics port."""
        return await asyncio.to_thread(fetch, self.app.http.port, path)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the values with these labels, as Prometheus would scrape them; 0 without any."""
        return sample_value(self.app.metrics, name, labels) or 0.0

    async def until_calls_are_over(self) -> None:
        """Wait until no handler runs, large answers are sent, and every request of an engine has ended."""
        await asyncio.wait_for(self.app.calls.wait_until_idle(), 20)
        async with asyncio.timeout(20):
            while self.app.calls.held.held:
                await asyncio.sleep(0.001)
        await self.turns.until(lambda: self.turns.num_ended == self.turns.num_submitted)

    async def check_that_everything_is_back(self) -> None:
        """Nothing waits, nothing runs, every slot is back, and nobody's stream is left."""
        await self.until_calls_are_over()
        for model in self.app.models:
            for name in (
                "num_requests_running",
                "num_requests_waiting",
                "slots_in_use",
                "slots_wanted",
                "kv_cache_usage_ratio",
            ):
                assert self.metric(f"seq2seq_{name}", model_name=model.name) == 0, name
            assert model.engine.num_slots_wanted() == 0
            assert not any(core.requests for core in model.engine.cores)


def entry(name: str, token: str, *roles: str) -> str:
    """A caller in a file of `--access-file`."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[[token]]\nname = "{name}"\nsha256 = "{digest}"\nroles = {list(roles)}\n'


def access_file(folder: Path, *callers: tuple[str, ...]) -> Path:
    """A file of callers, each with a name, a token and roles."""
    path = folder / "access.toml"
    path.write_text("".join(entry(*caller) for caller in callers))
    return path


def make_calls(metrics: Metrics) -> Calls:
    """Calls without a server, which need no model."""
    return Calls(Models(metrics), Access(None), [metrics.record_call])


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def echo_bundle(path: Path, runner: EchoRunner) -> Bundle:
    """Describes the runner, as the bundle of a model that reads and writes bytes."""
    tokenizer = byte_tokenizer()
    graph = GraphSpec(_FILE, inputs=(_IDS,), outputs=())
    manifest = Manifest(
        format_version=0,
        kind="echo",
        sizes={},
        source_vocab_size=tokenizer.vocab_size,
        target_vocab_size=tokenizer.vocab_size,
        special_ids=SpecialIds(PAD, (EOS,)),
        template=TokenTemplate(start=(BOS,), source_suffix=(EOS,)),
        sources={SOURCE_IDS: Form.TEXT},
        memory=LengthRule(SOURCE_IDS),
        max_source_length=runner.max_source_length,
        max_target_length=runner.max_target_length,
        source_tokenizer=_FILE,
        target_tokenizer=_FILE,
        variants={Precision.FP32: Variant({Verb.ENCODE: graph}, _FILE, Parity(0, None, ()))},
        generation=runner.generation,
        length_bound=runner.length_bound,
        provenance={"preset": "echo"},
    )
    return Bundle(path, manifest, "0123456789ab", tokenizer, tokenizer)


def with_manifest(model: ServedModel, tokenizer: Tokenizer | None = None, **changes: Any) -> ServedModel:
    """The model with other values in its manifest, or with another tokenizer."""
    bundle = Bundle(
        Path(),
        replace(model.manifest, **changes),
        model.version,
        tokenizer or model.source_tokenizer,
        tokenizer or model.target_tokenizer,
    )
    return ServedModel(model.engine, bundle, model.sizing)


def echo_sizing(runner: EchoRunner) -> Sizing:
    return Sizing(
        provider="cpu",
        precision=Precision.FP32,
        num_instances=1,
        num_threads=1,
        max_source_length=runner.max_source_length,
        sizes={
            Axis.CACHE_CAPACITY: runner.max_target_length,
            Axis.MEMORY_CAPACITY: runner.max_source_length,
        },
        groups=(),
        slot_bytes=1024,
        num_slots=runner.num_slots,
        weight_bytes=4096,
        packed_bytes=0,
        vocab_size=byte_tokenizer().vocab_size,
        num_hops=1,
    )


def loader_of(runners: dict[str, EchoRunner], turns: Turns, num_instances: int) -> Any:
    """A loader that puts engines over the runner that is called like the folder."""

    def load(
        path: Path,
        config: ServerConfig,
        model_name: str,
        record: Callable[[Turn], None],
        num_used_bytes: int = 0,
        version: str = "",
    ) -> ServedModel:
        runner = runners[model_name]

        def record_and_note(turn: Turn) -> None:
            record(turn)
            turns.note(turn)

        def build(deliver: Callable[[list[Turn]], object], died: Callable[[], object]) -> Core:
            core = Core(runner, model_name=model_name, deliver=deliver, died=died)
            core.start()
            return core

        engine = _CountingEngine(
            model_name,
            [ThreadCore(runner.num_slots, build) for _ in range(num_instances)],
            config.queue,
            record_and_note,
        )
        engine.turns = turns
        return ServedModel(engine, echo_bundle(path, runner), echo_sizing(runner), version)

    return load


def local_config(**changes: Any) -> ServerConfig:
    return ServerConfig(**{"host": "127.0.0.1", "port": 0, "metrics_port": 0} | changes)


@asynccontextmanager
async def serving(
    runner: EchoRunner | None = None,
    *,
    names: Sequence[str] = ("echo",),
    num_instances: int = 1,
    bundles: Sequence[Path] | None = None,
    **changes: Any,
) -> AsyncIterator[Served]:
    """A server with a model for each name; at the end every slot must be back.

    The names are those of `bundles`, by default, and of `named_bundles`.
    """
    runners = {name: (runner or EchoRunner()) if name == names[0] else EchoRunner() for name in names}
    turns = Turns()
    bundles = [Path(name) for name in names] if bundles is None else bundles
    app = App(bundles, local_config(**changes), loader_of(runners, turns, num_instances))
    try:
        await app.start()
        async with aio.insecure_channel(f"127.0.0.1:{app.endpoint.port}") as channel:
            served = Served(app, runners, turns, channel, Seq2SeqStub(channel))
            yield served
            for each in runners.values():
                each.gate.set()
            await served.check_that_everything_is_back()
    finally:
        for each in runners.values():
            each.gate.set()
        await app.stop()


@asynccontextmanager
async def serving_bundles(*paths: Path, **changes: Any) -> AsyncIterator[Served]:
    """A server of real bundles, to which callers send nothing that is still open at the end."""
    # Once a process shares its threads, the sessions of other tests would have to share them, too.
    config = local_config(**{"runner": RunnerConfig(num_threads=1), **changes})
    app = App(paths, config, load_model)
    try:
        await app.start()
        async with aio.insecure_channel(f"127.0.0.1:{app.endpoint.port}") as channel:
            served = Served(app, {}, Turns(), channel, Seq2SeqStub(channel))
            yield served
            await served.check_that_everything_is_back()
    finally:
        await app.stop()


def serving_on_a_thread(runner: EchoRunner | None = None, **changes: Any) -> AbstractContextManager[Served]:
    """`serving` for tests of code that blocks."""
    return on_a_thread(serving(runner, **changes))


@contextmanager
def on_a_thread(server: AbstractAsyncContextManager[_Server]) -> Iterator[_Server]:
    """Runs a server's loop on a thread of its own."""
    box: queue.Queue[tuple[_Server, asyncio.AbstractEventLoop, asyncio.Event] | BaseException] = queue.Queue()

    async def run() -> None:
        try:
            async with server as served:
                done = asyncio.Event()
                box.put((served, asyncio.get_running_loop(), done))
                await done.wait()
        except BaseException as error:
            box.put(error)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    started = box.get(timeout=20)
    if isinstance(started, BaseException):
        raise started
    served, loop, done = started
    try:
        yield served
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(30)
    if not box.empty():
        raise box.get()  # type: ignore[misc]
