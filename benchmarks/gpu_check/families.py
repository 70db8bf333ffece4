"""The parts of `benchmarks.gpu_check` that check what is computed: the device, tokens, log-probabilities."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.gpu_check.place import BASE, Findings, Place, encoded_rows, requests_for, step
from benchmarks.load.engine import DrivenEngine, settings_of, thread_engine
from seq2seq_serve.bundle.cuda_libraries import load_cuda_libraries
from seq2seq_serve.bundle.manifest import Manifest, load_bundle
from seq2seq_serve.bundle.names import Axis, Form, Precision
from seq2seq_serve.export.exporter import TOLERANCES
from seq2seq_serve.server.config import ProviderPolicy
from seq2seq_serve.server.engine.request import Array, Beam, Request, Sampling
from seq2seq_serve.server.engine.result import Result
from seq2seq_serve.server.runner.sizing import source_specs

FAMILIES = ("marian", "whisper", "recurrent")  # beside `base`
_NUM_REQUESTS, _NUM_TOKENS = 6, 12


def device(place: Place, found: Findings) -> Iterator[str]:
    """Report the card, and run two steps, which must be captured: then all of their operators run on it."""
    if place.scale.on_cuda:
        query = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.draw"
        command = ["nvidia-smi", query, "--format=csv"]
        found["card"] = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        found["libraries"] = load_cuda_libraries(None)
    started = time.perf_counter()
    runner = place.runner(place.scale.precisions[0], max(place.scale.rows))
    found["load_and_warm_up_seconds"] = time.perf_counter() - started
    rows = encoded_rows(runner, requests_for(place.sources(1), 2))
    step(runner, rows)
    step(runner, rows)
    found["first_tokens"] = rows[0].token_ids
    found["captured"] = runner.captures_steps
    if place.scale.on_cuda and not runner.captures_steps:
        yield "steps are not captured"


def families(place: Place, found: Findings) -> Iterator[str]:
    """Compare a bundle of each family with its float32 on the CPU, through the engine.

    Requests of every mode share a running batch. The CPU's targets are also scored at once.
    """
    for name in (BASE, *FAMILIES):
        manifest = load_bundle(place.folder / name).manifest
        asked = _requests(manifest)
        on_cpu = _Engine(place, name, Precision.FP32, ProviderPolicy.CPU)
        reference = on_cpu.answers(asked)
        scored = [
            replace(request, prefix_ids=result.best.token_ids, is_score=True)
            for request, result in zip(asked["greedy"], reference["greedy"], strict=True)
        ]
        reference |= on_cpu.answers({"score": scored})
        on_cpu.stop()
        for precision in set(place.scale.precisions) & manifest.variants.keys():
            here = _Engine(place, name, precision)
            answers = here.answers(asked) | here.answers({"score": scored})
            here.stop()
            worst = {mode: _worst(answers[mode], reference[mode]) for mode in ("greedy", "score")}
            equal = {
                mode: sum(
                    one.best.token_ids == other.best.token_ids
                    for one, other in zip(answers[mode], reference[mode], strict=True)
                )
                for mode in asked
            }
            found[f"{name} {precision}"] = {"worst_difference": worst, "equal_targets": equal}
            for mode, error in worst.items():
                if not error <= TOLERANCES[precision]:
                    yield f"{name}: {mode} in {precision} differs by {error:.2g} from float32"


def _requests(manifest: Manifest) -> dict[str, list[Request]]:
    """Returns requests of every mode for random sources of the family."""
    rng = np.random.default_rng(0)
    greedy = []
    for i in range(_NUM_REQUESTS):
        [(name, form)] = manifest.sources.items()
        source: Array = rng.integers(4, 290, 4 + 3 * i)
        if form is Form.SOUND:
            [spec] = source_specs(manifest, Precision.FP32)
            # Windows shorter by 0, 2, 4, … positions of memory, where a model takes them.
            length = (manifest.memory.whole_length or 0) - 2 * i * manifest.memory.stride
            shape = spec.shape({Axis.BATCH: 1, Axis.SOUND_LENGTH: length})[1:]
            source = rng.uniform(-1, 1.5, shape).astype(np.float32)
        memory_length = manifest.memory.memory_length_of({name: source})
        request = Request(
            str(i), {name: source}, memory_length, _NUM_TOKENS, time.monotonic(), **settings_of(manifest)
        )
        greedy.append(replace(request, log_probabilities=True))
    return {
        "greedy": greedy,
        "plain": [replace(one, log_probabilities=False) for one in greedy],
        "beam": [replace(one, beam=Beam(4)) for one in greedy],
        "sampling": [replace(one, sampling=Sampling(1.0, 0, 1.0, 0.0, i)) for i, one in enumerate(greedy)],
    }


class _Engine(DrivenEngine):
    """An engine of one bundle that decodes requests of several modes at once."""

    def __init__(
        self, place: Place, name: str, precision: Precision, policy: ProviderPolicy | None = None
    ) -> None:
        super().__init__(thread_engine(place.runner(precision, 4 * _NUM_REQUESTS, name, policy)))

    def answers(self, asked: dict[str, list[Request]]) -> dict[str, list[Result]]:
        # A runner forgets the sounds of a request once it has encoded them.
        requests = [replace(one, sources=dict(one.sources)) for mode in asked.values() for one in mode]
        results = iter(self.decode(requests))
        return {mode: [next(results) for _ in requests] for mode, requests in asked.items()}


def _worst(ours: list[Result], others: list[Result]) -> float:
    """Returns the largest difference of a log-probability, up to the first token that differs."""
    worst = 0.0
    for one, other in zip(ours, others, strict=True):
        for i, (a, b) in enumerate(zip(one.best.token_scores, other.best.token_scores, strict=False)):
            if one.best.token_ids[:i] == other.best.token_ids[:i]:
                worst = max(worst, abs(a.log_probability - b.log_probability))
    return worst
