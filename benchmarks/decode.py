"""The engine against CTranslate2 on the same weights: `python -m benchmarks.decode`.

Measured: whole greedy requests, encoding included, in this process and without gRPC: a `base` Transformer
with random weights, V = 32,000, 20 source tokens, 32 target tokens, at 1, 8 and 32 requests at once, fp32
and int8, on two cores. CTranslate2 runs at both of its thread settings on those cores; the faster one
counts. All contenders take turns within each round, and medians over the rounds are compared: such machines
change speed by themselves, so only ratios within one run mean anything. First the fp32 tokens of both
engines are compared.

Also: ms a step, the share of the time that is not spent inside ONNX Runtime ("python"), and the floor: the
bytes that a step must read (weights, and the rows' live cache and memory) over the read bandwidth of the
same cores. What the last-level cache keeps from one step to the next comes faster than that.

Not measured: tokenization, gRPC, waiting. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.hardware import describe_hardware
from bundle.manifest import load_bundle
from bundle.names import SOURCE_IDS, Precision
from export.exporter import export_bundle
from server.device import ProviderPolicy
from server.engine import Engine
from server.records import Request, Result, Turn
from server.runner import OnnxRunner, RunnerConfig
from training.presets import base
from training.run import TrainedModel
from training.tokenizer import train_tokenizer
from training.transformer import Transformer

_VOCAB_SIZE, _SOURCE_LENGTH, _NUM_TOKENS = 32_000, 20, 32
_ROWS = (1, 8, 32)
_CT2_TYPES = {Precision.FP32: "float32", Precision.INT8: "int8"}


class _TimedSession:
    """A session that adds up the seconds inside `run_with_iobinding`."""

    def __init__(self, session: Any, seconds: list[float]) -> None:
        self._session, self._seconds = session, seconds

    def io_binding(self) -> Any:
        return self._session.io_binding()

    def run_with_iobinding(self, binding: Any, *options: Any) -> None:
        started = time.perf_counter()
        self._session.run_with_iobinding(binding, *options)
        self._seconds.append(time.perf_counter() - started)


class Ours:
    """This project's engine, driven in process."""

    def __init__(self, bundle_path: Path, precision: Precision, num_threads: int) -> None:
        config = RunnerConfig(
            provider=ProviderPolicy.CPU, precision=precision, num_threads=num_threads, max_slots=max(_ROWS)
        )
        self.runner = OnnxRunner(load_bundle(bundle_path), config)
        self.runner.eos_id = -1  # every request runs to its last token
        self.graph_seconds: list[float] = []
        self.step_seconds: list[float] = []
        for verb, session in self.runner._sessions.items():
            self.runner._sessions[verb] = _TimedSession(session, self.graph_seconds)
        self.runner._select = _TimedSession(self.runner._select, self.graph_seconds)
        self._results: dict[Request, Result] = {}
        self._num_open = 0
        self._all_done = threading.Event()
        self._engine = Engine(self.runner, model_name="bench", deliver=self._deliver)
        self._engine.start()

    def greedy(self, sources: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Exactly `num_tokens` target tokens of each source."""
        self._results.clear()
        self._all_done.clear()
        self._num_open = len(sources)
        requests = [
            Request(str(i), {SOURCE_IDS: np.array(source)}, num_tokens, arrival=time.monotonic())
            for i, source in enumerate(sources)
        ]
        for request in requests:
            self._engine.submit(request)
        self._all_done.wait()
        return [list(self._results[request].best.token_ids) for request in requests]

    def stop(self) -> None:
        """End the engine's thread."""
        self._engine.stop()

    def _deliver(self, turn: Turn) -> None:
        self.step_seconds.append(turn.stats.step_seconds)
        for update in turn.updates:
            if update.result is not None:
                self._results[update.request] = update.result
                self._num_open -= 1
        if not self._num_open:
            self._all_done.set()


def random_base() -> TrainedModel:
    """A `base` model that nobody trained."""
    torch.manual_seed(0)
    config = dataclasses.replace(base().model, vocab_size=_VOCAB_SIZE)
    texts = ["the quick brown fox jumps over the lazy dog"]
    tokenizer = train_tokenizer(texts, 300)
    model = Transformer(config).eval()
    provenance = {"preset": "base", "corpus": "none: random weights"}
    return TrainedModel(model, tokenizer, config, provenance, [(text, text) for text in texts] * 4, 0.0)


def floor_seconds(model: Transformer, precision: Precision, num_rows: int, bandwidth: float) -> float:
    """Least time of a step: every weight, and every live position of cache and memory, is read once."""
    config = model.config
    D, F, L, V = config.d_model, config.d_ff, config.num_decoder_layers, config.vocab_size
    weight_bytes = (L * (6 * D * D + 2 * D * F) + V * D) * (1 if precision is Precision.INT8 else 4)
    live_positions = _NUM_TOKENS / 2 + _SOURCE_LENGTH
    row_bytes = 2 * L * live_positions * D * 4  # keys and values, float32 in both precisions
    return (weight_bytes + num_rows * row_bytes) / bandwidth


def read_bandwidth(num_threads: int) -> float:
    """Bytes a second read from arrays far larger than any cache, by as many threads."""
    arrays = [np.ones(1 << 26, np.float32) for _ in range(num_threads)]
    seconds = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(7):
            started = time.perf_counter()
            list(pool.map(lambda array: np.dot(array, array), arrays))
            seconds.append(time.perf_counter() - started)
    return sum(array.nbytes for array in arrays) / min(seconds)


def main() -> None:
    """Measure, print the table, and end with one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode",
        description=__doc__.splitlines()[0],
        epilog="example:\n  python -m benchmarks.decode --rounds 7",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of every contender (default: 7)")
    parser.add_argument("--cores", type=int, default=2, help="CPUs that everything runs on (default: 2)")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args()
    console = Console(stderr=True)
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    with tempfile.TemporaryDirectory() as name:
        report = measure(Path(name), options.rounds, len(cores), console)
    text = json.dumps(report)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    console.print(render(report))
    print(text)


def measure(folder: Path, num_rounds: int, num_cores: int, console: Console) -> dict[str, Any]:
    """Build the contenders, show that they agree, and let them take turns."""
    from benchmarks.ctranslate2_peer import (  # the `bench` extra, which --help needs not
        CTranslate2Peer,
        convert,
    )

    trained = random_base()
    console.print("exporting a random `base` model, and the same weights for CTranslate2")
    export_bundle(trained, folder / "bundle", (Precision.FP32, Precision.INT8))
    tokens = convert(trained.model, folder / "ct2")
    engines = {p: Ours(folder / "bundle", p, num_cores) for p in (Precision.FP32, Precision.INT8)}
    settings = {f"{inter}x{num_cores // inter}": (inter, num_cores // inter) for inter in {1, num_cores}}
    peers = {
        (precision, setting): CTranslate2Peer(folder / "ct2", tokens, compute_type, *threads)
        for precision, compute_type in _CT2_TYPES.items()
        for setting, threads in settings.items()
    }
    rng = np.random.default_rng(0)
    sources = [[*rng.integers(4, _VOCAB_SIZE, _SOURCE_LENGTH - 1).tolist(), 2] for _ in range(max(_ROWS))]
    ours = engines[Precision.FP32].greedy(sources, _NUM_TOKENS)
    theirs = peers[Precision.FP32, f"1x{num_cores}"].greedy(sources, _NUM_TOKENS)
    num_equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    console.print(f"fp32 greedy tokens equal for {num_equal} of {len(sources)} requests")
    bandwidth = read_bandwidth(num_cores)
    contenders: dict[tuple[Precision, str], Callable[[list[list[int]], int], list[list[int]]]] = {}
    for precision, engine in engines.items():
        contenders[precision, "ours"] = engine.greedy
    for (precision, setting), peer in peers.items():
        contenders[precision, f"ct2 {setting}"] = peer.greedy
    seconds: dict[tuple[str, str, int], list[float]] = {}
    python_shares: dict[tuple[str, int], list[float]] = {}
    steps: dict[tuple[str, int], list[float]] = {}
    for round_number in track(range(num_rounds + 1), "measuring", console=console):
        for num_rows in _ROWS:
            for (precision, name), run in contenders.items():
                engine = engines[precision]
                engine.graph_seconds.clear()
                engine.step_seconds.clear()
                started = time.perf_counter()
                run(sources[:num_rows], _NUM_TOKENS)
                elapsed = time.perf_counter() - started
                if round_number == 0:
                    continue  # warm-up
                seconds.setdefault((precision, name, num_rows), []).append(elapsed)
                if name == "ours":
                    share = 1 - sum(engine.graph_seconds) / elapsed
                    python_shares.setdefault((precision, num_rows), []).append(share)
                    steps.setdefault((precision, num_rows), []).append(statistics.median(engine.step_seconds))
    for engine in engines.values():
        engine.stop()
    results = []
    for precision in engines:
        for num_rows in _ROWS:
            rate = {
                name: num_rows * _NUM_TOKENS / statistics.median(seconds[precision, name, num_rows])
                for held, name in contenders
                if held == precision
            }
            best = max((name for name in rate if name != "ours"), key=rate.__getitem__)
            floor = floor_seconds(trained.model, precision, num_rows, bandwidth)
            results.append(
                {
                    "precision": precision.value,
                    "rows": num_rows,
                    "step_ms": 1e3 * statistics.median(steps[precision, num_rows]),
                    "floor_ms": 1e3 * floor,
                    "python_share": statistics.median(python_shares[precision, num_rows]),
                    "tokens_per_second": rate,
                    "ratio_to_best_ctranslate2": rate["ours"] / rate[best],
                }
            )
    return {
        "benchmark": "decode",
        "hardware": describe_hardware(),
        "rounds": num_rounds,
        "bandwidth_bytes_per_second": bandwidth,
        "equal_fp32_requests": [num_equal, len(sources)],
        "results": results,
    }


def render(report: dict[str, Any]) -> Table:
    """The report for people."""
    table = Table(title="tokens/s with encoding, and their ratio to the faster ct2")
    names = list(report["results"][0]["tokens_per_second"])
    for column in ("type", "rows", "ms/step", "floor", "python", *names, "ratio"):
        table.add_column(column, justify="right")
    for row in report["results"]:
        table.add_row(
            row["precision"],
            str(row["rows"]),
            f"{row['step_ms']:.2f}",
            f"{row['floor_ms']:.2f}",
            f"{row['python_share']:.1%}",
            *(f"{row['tokens_per_second'][name]:.0f}" for name in names),
            f"{row['ratio_to_best_ctranslate2']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
