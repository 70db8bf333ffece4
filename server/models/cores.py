"""Builds cores, and runs one in a thread of this process."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from seq2seq_serve.bundle.adapters import Weights
from seq2seq_serve.bundle.manifest import Bundle, VariantFiles
from seq2seq_serve.bundle.names import Verb
from seq2seq_serve.server.config import RunnerConfig, Speculation
from seq2seq_serve.server.engine.async_engine import CoreHandle
from seq2seq_serve.server.engine.core import Admit, Cancel, Core, Stop, WriteAdapter
from seq2seq_serve.server.engine.drafts import Drafter
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import Turn
from seq2seq_serve.server.engine.scheduler import SchedulerLimits
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import Sizing
from seq2seq_serve.server.system.threads import in_thread


@dataclass(frozen=True)
class CoreSpec:
    """All that a core is built from, except the weights.

    Attributes:
        bundle: Its tokenizers are not used.
        graphs: The content of the graphs' files, of the model and of its draft model, if it has one.
        copied_source: The source whose ids are those of targets, too; None if there is none.
        token_bytes: The table of the target's tokens, to which the stop rules of requests refer.
        log_level: As in the server's configuration.
        log_format: As in the server's configuration.
    """

    model_name: str
    bundle: Bundle
    runner: RunnerConfig
    sizing: Sizing
    graphs: tuple[dict[Verb, bytes], ...]
    limits: SchedulerLimits
    copied_source: str | None
    token_bytes: tuple[bytes, ...]
    log_level: str
    log_format: str


def started_core(
    spec: CoreSpec,
    weights: Sequence[memoryview],
    deliver: Callable[[list[Turn]], object],
    died: Callable[[], object],
) -> Core:
    """Load the graphs, and start the core on a thread of this process.

    Args:
        spec: Describes the core.
        weights: Those of the model, and of its draft model, if it has one.
        deliver: As for `Core`.
        died: As for `Core`.

    Raises:
        ValueError: The bundle cannot be used here; the message names it.
    """
    draft = spec.sizing.draft
    models = [(spec.bundle, spec.sizing), *([(draft.bundle, draft.sizing)] if draft is not None else [])]
    runners = list[OnnxRunner]()
    for (bundle, sizing), graphs, content in zip(models, spec.graphs, weights, strict=True):
        files, is_draft = VariantFiles(graphs, content), bool(runners)
        try:
            runners.append(OnnxRunner(bundle, spec.runner, sizing, files, is_draft=is_draft))
        except Exception as error:  # ONNX Runtime's errors do not have a common class
            for runner in runners:
                runner.close()
            raise ValueError(f"{bundle.path}: {error}") from error
    runner, *draft_runners = runners
    drafts = spec.runner.speculative is Speculation.NGRAM and runner.takes_drafts
    core = Core(
        runner,
        model_name=spec.model_name,
        deliver=deliver,
        died=died,
        limits=spec.limits,
        drafter=Drafter(runner.eos_ids, spec.copied_source) if drafts else None,
        draft_runner=draft_runners[0] if draft_runners else None,
    )
    try:
        core.start()
    except Exception as error:  # ONNX Runtime's errors do not have a common class
        core.stop()
        raise ValueError(f"{spec.bundle.path}: the graphs do not run here: {error}") from error
    return core


class ThreadCore(CoreHandle):
    """A core in a thread of this process.

    Args:
        num_slots: The number of sequences that it decodes at once.
        build: Builds and starts it, given what it calls with its turns, and at an end by itself.
    """

    def __init__(
        self, num_slots: int, build: Callable[[Callable[[list[Turn]], object], Callable[[], object]], Core]
    ) -> None:
        super().__init__(num_slots)
        self._build = build
        self._core: Core | None = None
        self._is_stopped = False

    async def start(self, turned: Callable[[Sequence[Turn]], None], ended: Callable[[str], None]) -> None:
        """Build it on another thread; as `CoreHandle.start`."""
        call = asyncio.get_running_loop().call_soon_threadsafe
        deliver: Callable[[list[Turn]], object] = partial(call, turned)  # type: ignore[arg-type]  # turns follow
        died = partial(call, ended, "the engine's thread ended")

        def build() -> None:
            core = self._build(deliver, died)
            is_first, self._core = self._core is None, core
            if is_first:
                atexit.register(self._exit)
            if self._is_stopped:  # meanwhile: nobody waits for it any more
                self._exit()
                atexit.unregister(self._exit)

        await asyncio.to_thread(build)

    def admit(self, requests: tuple[Request, ...]) -> None:
        """As `CoreHandle.admit`."""
        assert self._core is not None
        self._core.send(Admit(requests))

    def cancel(self, request: Request, *, is_expired: bool) -> None:
        """As `CoreHandle.cancel`."""
        assert self._core is not None
        self._core.send(Cancel(request, is_expired))

    def write_adapter(self, place: int, weights: Weights) -> None:
        """As `CoreHandle.write_adapter`."""
        assert self._core is not None
        self._core.send(WriteAdapter(place, weights))

    def kill(self) -> None:
        """As `CoreHandle.kill`."""
        assert self._core is not None
        self._core.send(Stop())

    def watch(self) -> None:
        """As `CoreHandle.watch`."""
        if self._core is not None:
            self._core.watch()

    def turn_seconds(self) -> float:
        """As `CoreHandle.turn_seconds`."""
        return 0.0 if self._core is None else self._core.turn_seconds()

    async def stop(self) -> None:
        """As `CoreHandle.stop`; one that is being built ends after that."""
        self._is_stopped = True
        if self._core is not None:
            await in_thread(self._core.stop)
            atexit.unregister(self._exit)

    def _exit(self) -> None:
        """End it before the interpreter, which aborts if a thread is inside of ONNX Runtime."""
        assert self._core is not None
        self._core.stop()
