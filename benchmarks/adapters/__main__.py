"""Measures adapters of one model, each row with its own, in one batch: `python -m benchmarks.adapters`.

The model is `base` (V = 32,000) with random weights, and an adapter has terms of rank 16 on all maps, which
change a weight by about a tenth. Three parts, of which `--only` takes one:

    speed    Requests of 20 source and 32 target tokens, n at once, without gRPC. By pairs, one right after
             the other: all on one adapter, or on eight of them, over the same requests by a bundle that was
             exported without adapters. The order alternates; the median over all pairs and the quartiles are
             reported. So is the bundle's own cost, with rows that have no adapter.
    quality  The mean difference of the log-probabilities of targets between int8 and fp32: of the model with
             an adapter, and of the model alone.
    server   One server with eight adapters, beside one server with eight merged models, in each precision.
             Both get the same closed loop over gRPC in turn, 8 and 32 requests at once, of which each is for
             one of the eight. The rate is that of pairs, and the memory is what each process has to itself
             at the end (Linux).

The last line on standard output is one JSON object. `python -m benchmarks.adapters whisper` is about an
adapter that is trained: see `whisper.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.adapters import whisper
from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware
from benchmarks.load.drive import Clock, closed_loop
from benchmarks.load.engine import DrivenEngine, thread_engine
from benchmarks.load.mix import ONLY_GREEDY, VOCAB_SIZE, Job, Outcome, draw_jobs, throughput
from benchmarks.random_models import random_trained
from benchmarks.report import bar, command, markdown, publish
from benchmarks.serving import RunningServer, serving
from seq2seq_serve.bundle.adapters import (
    ADAPTER_VERSION,
    WEIGHTS_FILE,
    AdaptedShape,
    AdapterManifest,
    Weights,
    write_adapter,
)
from seq2seq_serve.bundle.manifest import Bundle, FileSpec, Parity, load_bundle
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision
from seq2seq_serve.client import AsyncClient
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig, Speculation
from seq2seq_serve.server.engine.request import NO_ADAPTER, Request
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.training.presets import PRESETS
from seq2seq_serve.training.run import TrainedModel

_NUM_ADAPTERS, _RANK, _CHANGE = 8, 16, 0.1
_SOURCE_TOKENS, _TARGET_TOKENS = 20, 32
_PRECISIONS = (Precision.FP32, Precision.INT8)
_ROWS, _IN_FLIGHT = (1, 8, 32), (8, 32)
_WARM_UP = 3
_BARS = {"one adapter": 0.85, "eight adapters": 0.75}
_QUALITY_TARGETS = 40
_SETTINGS: dict[str, Any] = {"provider": ProviderPolicy.CPU, "speculative": Speculation.OFF}
_PARTS = ("speed", "quality", "server")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print one JSON object; returns 0 if every bar is met."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["whisper"]:
        return whisper.main(arguments[1:])
    parser = command("adapters", __doc__, "--out benchmarks/results/X.json\n--only speed --rounds 30")
    parser.add_argument("--only", choices=_PARTS, help="one part (default: all)")
    parser.add_argument("--rounds", type=positive, default=20, help="pairs (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=2, help="(default: %(default)s)")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="base", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    parts = [options.only] if options.only else _PARTS
    report: dict[str, Any] = {"benchmark": "adapters", "hardware": describe_hardware()}
    with tempfile.TemporaryDirectory(prefix="adapters-") as temporary:
        folder = Path(temporary)
        trained = _trained(options.preset)
        export_bundle(trained, folder / "adapted", _PRECISIONS, proves=False, adapters=True)
        adapted = load_bundle(folder / "adapted")
        adapters = [_random_adapter(adapted, seed) for seed in range(_NUM_ADAPTERS)]
        bars: list[dict[str, Any]] = []
        if "speed" in parts:
            export_bundle(trained, folder / "plain", _PRECISIONS, proves=False)
            report["speed"] = _speed(load_bundle(folder / "plain"), adapted, adapters, options)
            bars += [
                bar(
                    f"{row['rows']}, {row['precision']}, x {row['in_flight']}",
                    row["ratio"],
                    _BARS[row["rows"]],
                )
                for row in report["speed"]
                if row["rows"] in _BARS
            ]
        if "quality" in parts:
            report["quality"] = _quality(adapted, adapters, options)
            ratio = report["quality"]["ratio"]
            bars.append(bar("int8 with an adapter over int8 alone", ratio, 1.2, is_least=False))
        if "server" in parts:
            report["server"] = _servers(trained, adapted, adapters, folder, options)
            for row in report["server"]:
                name = f"over merged models, {row['precision']}"
                bars += [
                    bar(f"requests/s {name}, x {load['in_flight']}", load["ratio"], 3)
                    for load in row["loads"]
                ]
                bars.append(bar(f"memory {name}", row["memory_share"], 0.25, is_least=False))
    report["bars"] = bars
    rows = [(one["name"], f"{one['value']:.3g}", one["bar"], "yes" if one["met"] else "no") for one in bars]
    print(markdown(("what", "value", "bar", "met"), rows), file=sys.stderr)
    publish(report, options.out)
    return 0 if all(one["met"] for one in bars) else 1


def _trained(preset: str) -> TrainedModel:
    config = dataclasses.replace(PRESETS[preset]().model, vocab_size=VOCAB_SIZE)
    return random_trained(config)


def _random_adapter(bundle: Bundle, seed: int) -> Weights:
    """Returns terms of all maps, which change a weight by `_CHANGE` of its own deviation."""
    rng = np.random.default_rng(seed)
    weights = {}
    for one in bundle.manifest.adapted_maps:
        for part in one.parts:
            a = rng.standard_normal((_RANK, one.num_inputs)) / np.sqrt(one.num_inputs)
            b = rng.standard_normal((_RANK, part.num_outputs)) * _CHANGE / np.sqrt(_RANK)
            weights[part.name] = a.astype(np.float16), b.astype(np.float16)
    return weights


def _speed(
    plain: Bundle, adapted: Bundle, adapters: Sequence[Weights], options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for precision in _PRECISIONS:
        with (
            _engine(plain, precision, (), options) as one,
            _engine(adapted, precision, adapters, options) as other,
        ):
            for in_flight in _ROWS:
                ways = {
                    "no adapter": [NO_ADAPTER] * in_flight,
                    "one adapter": [0] * in_flight,
                    "eight adapters": [number % _NUM_ADAPTERS for number in range(in_flight)],
                }
                for name, ids in ways.items():
                    if in_flight == _ROWS[-1] or name != "eight adapters":
                        rows.append(
                            {"rows": name, "precision": precision, "in_flight": in_flight}
                            | _pairs(one, other, ids, options.rounds)
                        )
                        print(rows[-1], file=sys.stderr)
    return rows


@contextmanager
def _engine(
    bundle: Bundle, precision: Precision, adapters: Sequence[Weights], options: argparse.Namespace
) -> Iterator[DrivenEngine]:
    """Yields an engine with the adapters, which ends with the block."""
    config = RunnerConfig(
        **_SETTINGS,
        precision=precision,
        num_threads=options.threads,
        shares_threads=True,
        max_slots=_ROWS[-1],
        max_adapters=_NUM_ADAPTERS,
        has_adapters=True,
    )
    runner = OnnxRunner(bundle, config)
    for place, weights in enumerate(adapters):
        runner.write_adapter(place, weights)
    engine = DrivenEngine(thread_engine(runner))
    try:
        yield engine
    finally:
        engine.stop()


def _pairs(plain: DrivenEngine, adapted: DrivenEngine, ids: Sequence[int], rounds: int) -> dict[str, Any]:
    """Returns the ratio of speeds, adapted over plain, and the tokens a second of both."""
    chance, ratios = random.Random(0), list[float]()
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for number in range(_WARM_UP + rounds):
        sources = [[*chance.choices(range(4, 4000), k=_SOURCE_TOKENS - 1), 2] for _ in ids]
        took = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            places = ids if which else [NO_ADAPTER] * len(ids)
            requests = [_request(source, place) for source, place in zip(sources, places, strict=True)]
            began = time.perf_counter()
            (adapted if which else plain).decode(requests)
            took[which] = time.perf_counter() - began
        if number >= _WARM_UP:
            ratios.append(took[0] / took[1])
            for which in (0, 1):
                seconds[which].append(took[which])
    num_tokens = len(ids) * _TARGET_TOKENS
    return {
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4),
        "tokens_per_second": num_tokens / statistics.median(seconds[1]),
        "tokens_per_second_plain": num_tokens / statistics.median(seconds[0]),
    }


def _request(source: Sequence[int], adapter: int, **options: Any) -> Request:
    return Request(
        "",
        {SOURCE_IDS: np.array(source)},
        len(source),
        _TARGET_TOKENS,
        time.monotonic(),
        adapter=adapter,
        **options,
    )


def _quality(adapted: Bundle, adapters: Sequence[Weights], options: argparse.Namespace) -> dict[str, Any]:
    """Returns mean differences of log-probabilities of fp32's own targets, in nats a token."""
    chance = random.Random(1)
    sources = [[*chance.choices(range(4, 4000), k=_SOURCE_TOKENS - 1), 2] for _ in range(_QUALITY_TARGETS)]
    differences = {}
    with (
        _engine(adapted, Precision.FP32, adapters, options) as single,
        _engine(adapted, Precision.INT8, adapters, options) as quantised,
    ):
        for name, places in (("alone", [NO_ADAPTER]), ("adapted", range(_NUM_ADAPTERS))):
            ids = [places[number % len(places)] for number in range(len(sources))]
            targets = single.decode([_request(*pair) for pair in zip(sources, ids, strict=True)])
            scores = [
                engine.decode(
                    [
                        _request(source, place, prefix_ids=target.best.token_ids[:-1], is_score=True)
                        for source, place, target in zip(sources, ids, targets, strict=True)
                    ]
                )
                for engine in (single, quantised)
            ]
            differences[name] = statistics.mean(
                abs(one.log_probability - other.log_probability)
                for pair in zip(*scores, strict=True)
                for one, other in zip(*(result.best.token_scores for result in pair), strict=True)
            )
    return differences | {"ratio": differences["adapted"] / differences["alone"]}


def _servers(
    trained: TrainedModel,
    adapted: Bundle,
    adapters: Sequence[Weights],
    folder: Path,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    adapter_flags = ["--max-adapters", str(_NUM_ADAPTERS), "--max-rank", str(_RANK)]
    merged = []
    for number, weights in enumerate(adapters):
        path = folder / f"a{number}"
        path.mkdir()
        write_adapter(path, _manifest(adapted, weights), weights)
        adapter_flags += ["--adapter", f"a{number}={path}"]
        print(f"exporting merged model {number + 1} of {len(adapters)}", file=sys.stderr)
        _add(trained, weights, 1)
        merged.append(folder / "merged" / f"a{number}")
        export_bundle(trained, merged[-1], _PRECISIONS, proves=False)
        _add(trained, weights, -1)
    rows = []
    for precision in _PRECISIONS:
        flags = ["--threads", str(options.threads), "--provider", "cpu", "--precision", precision]
        # As many slots in all: a merged model has room for its part of the requests, and as many again.
        slots = [["--max-slots", str(number)] for number in (_ROWS[-1], 2 * _ROWS[-1] // _NUM_ADAPTERS)]
        with ExitStack() as stack:
            servers = [
                stack.enter_context(serving(adapted.path, [*flags, *slots[0], *adapter_flags])),
                stack.enter_context(serving(merged, [*flags, *slots[1]])),
            ]
            names = f"{adapted.path.name}/a{{}}", "a{}"
            loads = [_beside_merged(servers, names, number, options.rounds) for number in _IN_FLIGHT]
            memory = [_own_bytes(server) for server in servers]
        rows.append(
            {
                "precision": precision,
                "loads": loads,
                "memory_bytes": memory[0],
                "memory_bytes_merged": memory[1],
                "memory_share": memory[0] / memory[1],
            }
        )
        print(rows[-1], file=sys.stderr)
    return rows


def _beside_merged(
    servers: Sequence[RunningServer], names: Sequence[str], in_flight: int, rounds: int
) -> dict[str, Any]:
    """Returns the ratio of requests a second, adapters over merged models, and both rates."""
    rates: list[list[float]] = [[], []]
    for number in range(max(rounds // 4, 3)):
        for which in (0, 1) if number % 2 else (1, 0):
            rates[which].append(asyncio.run(_load(servers[which], names[which], in_flight, number)))
    return {
        "in_flight": in_flight,
        "ratio": statistics.median(one / other for one, other in zip(*rates, strict=True)),
        "requests_per_second": statistics.median(rates[0]),
        "requests_per_second_merged": statistics.median(rates[1]),
    }


def _add(trained: TrainedModel, weights: Weights, sign: int) -> None:
    for name, (a, b) in weights.items():
        layer = trained.model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            layer.weight += sign * torch.from_numpy(b.T.astype(np.float32) @ a.astype(np.float32))


def _manifest(bundle: Bundle, weights: Weights) -> AdapterManifest:
    parts = {name: AdaptedShape(len(a), a.shape[1], b.shape[1]) for name, (a, b) in weights.items()}
    proof, nothing = Parity(0.0, None, ()), FileSpec(WEIGHTS_FILE, "", 0)
    return AdapterManifest(ADAPTER_VERSION, "random", bundle.manifest.adapted_checksum, parts, nothing, proof)


async def _load(server: RunningServer, name: str, in_flight: int, seed: int) -> float:
    """Returns the requests a second of a closed loop over all models in turn."""
    jobs = draw_jobs(12 * in_flight, ONLY_GREEDY, seed)
    numbers: Iterator[int] = iter(number % _NUM_ADAPTERS for number in range(len(jobs)))
    async with AsyncClient(server.address) as client:

        async def answer(outcome: Outcome, _now: Clock) -> None:
            job: Job = outcome.job
            model = name.format(next(numbers))
            answered = await client.generate(job.source_ids, options=job.options(), model=model)
            outcome.num_tokens = len(answered.hypotheses[0].token_ids)

        return throughput(await closed_loop(answer, jobs, in_flight), in_flight).requests_per_second


def _own_bytes(server: RunningServer) -> int:
    """Returns the memory of a process, with its part of what it shares (PSS)."""
    content = Path(f"/proc/{server.process.pid}/smaps_rollup").read_text()
    fields: Mapping[str, str] = dict(line.split(":", 1) for line in content.splitlines()[1:])
    return int(fields["Pss"].split()[0]) << 10


if __name__ == "__main__":
    sys.exit(main())
