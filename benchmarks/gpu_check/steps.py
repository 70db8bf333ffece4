"""The parts of `benchmarks.gpu_check` that measure steps: ours, transformers', floors, and kernels.

Measured: whole greedy requests, encoding included, without gRPC and scheduling, and the milliseconds of a
step with and without captured graphs. Contenders alternate within each round; medians over the rounds are
compared. The floor of a step is the time to start its kernels one after the other, plus the time to read the
bytes that it needs.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.place import (
    DTYPES,
    ENCODED_AT_ONCE,
    Findings,
    Place,
    Scale,
    encoded_rows,
    feed,
    greedy,
    requests_for,
)
from benchmarks.peers.work import Search
from benchmarks.report import bar
from seq2seq_serve import kernels
from seq2seq_serve.server.engine.state import Sequence
from seq2seq_serve.server.runner.runner import OnnxRunner

# Decodes sources to some tokens; returns the seconds of its steps, if it knows them.
_Contender = Callable[[list[list[int]], int], list[float]]
_KERNELS_OF_A_LAYER, _OTHER_KERNELS = 12, 7
_NUM_LAUNCHES = 1000
_STATIC_ROWS = (64,)  # transformers compiles for each number, which takes tens of seconds
_PROFILED_STEPS = 20
_MAX_KERNELS = 40


def speed(place: Place, found: Findings) -> str:
    """Measure our steps and requests beside `generate`, and the floors."""
    contenders: dict[str, _Contender] = {}
    problems = []
    for precision in place.scale.precisions:
        for is_captured in (True, False):
            name = f"ours {precision}{'' if is_captured else ' uncaptured'}"
            runner = place.runner(precision, max(place.scale.rows), cuda_graphs=is_captured)
            if is_captured and place.scale.on_cuda and not runner.captures_steps:
                problems.append(f"{name} is not captured")
            contenders[name] = _ours(runner)
    precision = place.scale.precisions[0]
    with _without_own_operators():
        runner = place.runner(precision, max(place.scale.rows))
        contenders[f"ours {precision} without own operators"] = _ours(runner)
    try:
        contenders["generate"] = _transformers(place, is_static=False)
    except Exception as error:  # the others continue
        problems.append(f"generate: {error!r}"[:300])
    _measure(place, found, contenders, place.scale.rows)
    return "; ".join(problems)


def static(place: Place, found: Findings) -> str:
    """Measure `generate` with a static cache, which transformers compiles, beside our first precision."""
    precision = place.scale.precisions[0]
    contenders = {
        f"ours {precision}": _ours(place.runner(precision, max(place.scale.rows))),
        "generate static": _transformers(place, is_static=True),
    }
    _measure(place, found, contenders, tuple(rows for rows in place.scale.rows if rows in _STATIC_ROWS))
    return ""


@contextmanager
def _without_own_operators() -> Iterator[None]:
    """Sessions that are created meanwhile run the operators' definitions."""
    own = kernels.register
    kernels.register = lambda *_, **__: False
    try:
        yield
    finally:
        kernels.register = own


def _ours(runner: OnnxRunner) -> _Contender:
    def run(sources: list[list[int]], num_tokens: int) -> list[float]:
        seconds: list[float] = []
        greedy(runner, sources, num_tokens, seconds)
        return seconds

    return run


def _transformers(place: Place, *, is_static: bool) -> _Contender:
    # They take seconds to import, and other parts do not need them.
    from benchmarks.peers.marian import as_marian
    from benchmarks.peers.transformers_peer import TransformersPeer

    dtype = DTYPES[place.scale.precisions[0]]
    marian = as_marian(place.trained.model, torch.device(place.scale.device), dtype)
    # No target ends early, so that every contender decodes as many tokens.
    marian.generation_config.eos_token_id = None
    marian.generation_config.pad_token_id = 0
    peer = TransformersPeer(marian, is_static=is_static)

    def run(sources: list[list[int]], num_tokens: int) -> list[float]:
        peer.generate(sources, Search(1, num_tokens, 0))
        return []

    return run


def _measure(
    place: Place, found: Findings, contenders: dict[str, _Contender], all_rows: tuple[int, ...]
) -> None:
    """Run the contenders in alternation, and write a table of medians; the first round is warm-up."""
    scale, device = place.scale, torch.device(place.scale.device)
    found["bandwidth_bytes_per_second"] = bandwidth = read_bandwidth(device)
    found["launch_microseconds"] = 1e6 * launch_seconds(device)
    launches_seconds = step_kernels(scale.model.num_decoder_layers) * found["launch_microseconds"] / 1e6
    sources = place.sources(max(scale.rows), scale.source_length)
    results: list[dict[str, Any]] = []
    for num_rows in all_rows:
        seconds, steps = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        for round_number in range(scale.num_rounds + 1):
            for name, contender in contenders.items():
                started = time.perf_counter()
                step_seconds = contender(sources[:num_rows], scale.num_tokens)
                if round_number:
                    seconds[name].append(time.perf_counter() - started)
                    steps[name] += step_seconds
        for name, taken in seconds.items():
            rate = num_rows * scale.num_tokens / statistics.median(taken)
            row = {"contender": name, "rows": num_rows, "tokens_per_second": round(rate)}
            if steps[name]:
                precision = next(p for p in scale.precisions if p in name.split())
                reading = step_bytes(scale, DTYPES[precision].itemsize, num_rows) / bandwidth
                row |= {
                    "step_ms": 1e3 * statistics.median(steps[name]),
                    "floor_ms": 1e3 * (launches_seconds + reading),
                }
            results.append(row)
        found["results"] = results


def profile(place: Place, found: Findings) -> str:
    """List the kernels of a captured step and of an encode call, with the time of each on the device."""
    from torch.profiler import ProfilerActivity

    if not place.scale.on_cuda:
        return ""
    runner = place.runner(place.scale.precisions[0], max(place.scale.rows))
    for num_rows in (min(place.scale.rows), max(place.scale.rows)):
        requests = requests_for(place.sources(num_rows, place.scale.source_length), 64)
        rows = encoded_rows(runner, requests)

        def step(rows: tuple[Sequence, ...] = rows) -> None:
            feed(rows, runner.step(rows).token_ids)

        runs: dict[str, Callable[[], None]] = {
            "step": step,
            "encode": partial(runner.encode, 0, requests[:ENCODED_AT_ONCE]),
        }
        for name, run in runs.items():
            run()
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiled:
                started = time.perf_counter()
                for _ in range(_PROFILED_STEPS):
                    run()
                seconds = time.perf_counter() - started
            launched = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
            found[f"{name} of {num_rows}"] = {
                "wall_microseconds": 1e6 * seconds / _PROFILED_STEPS,
                "device_microseconds": sum(e.self_device_time_total for e in launched) / _PROFILED_STEPS,
                "kernels": [
                    [e.key[:110], e.count / _PROFILED_STEPS, e.self_device_time_total / _PROFILED_STEPS]
                    for e in launched[:_MAX_KERNELS]
                ],
            }
    return ""


def step_bytes(scale: Scale, item_bytes: int, num_rows: int) -> float:
    """Returns the mean bytes that a step must read: each weight once, and the rows' live cache and memory."""
    config = scale.model
    D, F, L, V = config.d_model, config.d_ff, config.num_decoder_layers, config.vocab_size
    weights = L * (6 * D * D + 2 * D * F) + V * D
    row = 2 * L * D * (scale.source_length + scale.num_tokens / 2)  # keys and values
    return item_bytes * (weights + num_rows * row)


def step_kernels(num_decoder_layers: int) -> int:
    """Returns the number of kernels in a captured post-norm step; the tests on the CUDA stub check it."""
    return _OTHER_KERNELS + _KERNELS_OF_A_LAYER * num_decoder_layers


def launch_seconds(device: torch.device) -> float:
    """Measure the time per kernel in a replayed graph of trivial kernels; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    array, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    array += 1
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(_NUM_LAUNCHES):
            array += 1
    seconds = []
    for _ in range(7):
        torch.cuda.synchronize()
        started = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds) / _NUM_LAUNCHES


def read_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second read by a sum over an array far larger than any cache."""
    array = torch.ones(1 << (29 if device.type == "cuda" else 24), device=device)
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        array.sum().item()
        seconds.append(time.perf_counter() - started)
    return array.nbytes / min(seconds)


def bars(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns each bar with its measured value, given the findings of each part."""
    results = [row for part in ("speed", "static") for row in found.get(part, {}).get("results", [])]
    ours = {row["rows"]: row for row in results if row["contender"] == "ours fp16"}
    theirs = [
        row["tokens_per_second"] for row in results if row["rows"] == 64 and "generate" in row["contender"]
    ]
    one, many, largest = (ours.get(rows) for rows in (1, 64, 256))
    times_floor = largest["step_ms"] / largest["floor_ms"] if largest else None
    times_generate = many["tokens_per_second"] / max(theirs) if many and theirs else None
    loops = found.get("load", {}).get("closed loops")
    growth = found.get("memory", {}).get("growth_bytes")
    return [
        bar("ms of a captured step at 1 row", one and one["step_ms"], 0.35, is_least=False),
        bar("times its floor that a step takes at 256 rows", times_floor, 2.0, is_least=False),
        bar("times the tokens/s of the faster `generate` at 64 rows", times_generate, 5.0),
        bar(
            "share of the engine's tokens/s through gRPC",
            loops and loops["greedy"]["unary"]["to_engine"],
            0.85,
        ),
        bar("MiB by which memory grew", None if growth is None else growth / 2**20, 64, is_least=False),
    ]
