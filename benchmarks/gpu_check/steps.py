"""The parts of `benchmarks.gpu_check` that measure steps: ours, transformers', floors, and kernels.

Measured: whole greedy requests, encoding included, without gRPC and scheduling, and the milliseconds of a
captured step. Contenders alternate within each round; medians over the rounds are compared. The floor of a
step is the time to start its kernels one after the other, plus the time to read the bytes that it needs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.floors import least_seconds, step_size
from benchmarks.gpu_check.place import ENCODED_AT_ONCE, Findings, Place, encoded_rows, requests_for, step
from benchmarks.report import median
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.runner.runner import OnnxRunner

# Decodes sources to some tokens; returns the seconds of its steps, if it knows them.
_Contender = Callable[[list[list[int]], int], list[float]]
_DTYPES = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
_FEW_ROWS = 16  # as many as `CudaNormLinear` computes in one kernel
_MOST_FLOORS, _LEAST_RATIO = 2.0, 5.0  # bars: of a step, and of tokens/s to `generate`
_NUM_LAUNCHES = 1000
_PROFILED_STEPS = 20
_MAX_KERNELS = 40


def speed(place: Place, found: Findings) -> Iterator[str]:
    """Measure our steps and requests beside `generate`, and the floors; the first round is warm-up."""
    scale, device = place.scale, torch.device(place.scale.device)
    contenders: dict[str, _Contender] = {
        precision.value: partial(_decode, place.runner(precision, max(scale.rows)))
        for precision in scale.precisions
    }
    try:
        contenders["generate"] = _generate(place)
    except Exception as error:  # the others continue
        yield f"generate: {error!r}"
    found["bandwidth_bytes_per_second"] = bandwidth = _read_bandwidth(device)
    found["launch_seconds"] = launch_seconds = _launch_seconds(device)
    found["results"] = results = dict[str, dict[str, Any]]()
    for num_rows in scale.rows:
        sources = place.sources(num_rows, scale.source_length)
        seconds, steps = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        for round_number in range(scale.num_rounds + 1):
            for name, contender in contenders.items():
                started = time.perf_counter()
                taken = contender(sources, scale.num_tokens)
                if round_number:
                    seconds[name].append(time.perf_counter() - started)
                    steps[name] += taken
        size = step_size(scale.model, num_rows, 1, scale.source_length, scale.num_tokens / 2)
        rates = {name: num_rows * scale.num_tokens / median(taken) for name, taken in seconds.items()}
        results[f"{num_rows} rows"] = row = {"tokens_per_second": rates, "step_ms": {}, "floors": {}}
        for precision in scale.precisions:
            floor = step_kernels(scale.model.num_decoder_layers, num_rows) * launch_seconds
            floor += _DTYPES[precision].itemsize * (size.num_weights + size.num_live) / bandwidth
            row["step_ms"][precision] = 1e3 * median(steps[precision])
            row["floors"][precision] = median(steps[precision]) / floor
        found["results"] = results
        first = scale.precisions[0]
        if scale.on_cuda and row["floors"][first] > _MOST_FLOORS:
            yield f"a step of {num_rows} rows takes {row['floors'][first]:.1f} floors (bar {_MOST_FLOORS})"
        if scale.on_cuda and rates[first] < _LEAST_RATIO * rates.get("generate", 0):
            ratio = rates[first] / rates["generate"]
            yield f"{num_rows} rows have {ratio:.1f} times generate's tokens/s (bar {_LEAST_RATIO})"


def _decode(runner: OnnxRunner, sources: list[list[int]], num_tokens: int) -> list[float]:
    rows, seconds = encoded_rows(runner, requests_for(sources, num_tokens)), []
    for _ in range(num_tokens):
        started = time.perf_counter()
        step(runner, rows)
        seconds.append(time.perf_counter() - started)
    return seconds


def _generate(place: Place) -> _Contender:
    # They take seconds to import, and other parts do not need them.
    from benchmarks.peers.marian import as_marian
    from benchmarks.peers.transformers_peer import TransformersPeer
    from benchmarks.peers.work import Search

    dtype = _DTYPES[place.scale.precisions[0]]
    marian = as_marian(place.trained.model, torch.device(place.scale.device), dtype)
    # No target ends early, so that every contender decodes as many tokens.
    marian.generation_config.eos_token_id = None
    marian.generation_config.pad_token_id = 0
    peer = TransformersPeer(marian)

    def run(sources: list[list[int]], num_tokens: int) -> list[float]:
        peer.generate(sources, Search(1, num_tokens))
        return []

    return run


def profile(place: Place, found: Findings) -> Iterator[str]:
    """List the kernels of a captured step and of an encode call, with the time of each on the device."""
    from torch.profiler import ProfilerActivity

    if not place.scale.on_cuda:
        return
    runner = place.runner(place.scale.precisions[0], max(place.scale.rows))
    for num_rows in (min(place.scale.rows), max(place.scale.rows)):
        requests = requests_for(place.sources(num_rows, place.scale.source_length), 64)
        rows = encoded_rows(runner, requests)
        runs: dict[str, Callable[[], None]] = {
            "step": partial(step, runner, rows),
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
                "kernels: name, count, microseconds": [
                    [e.key[:110], e.count / _PROFILED_STEPS, e.self_device_time_total / _PROFILED_STEPS]
                    for e in launched[:_MAX_KERNELS]
                ],
            }
            if not launched:
                yield f"no kernel of the {name} of {num_rows} was recorded"


def step_kernels(num_decoder_layers: int, num_rows: int) -> int:
    """Returns the number of kernels in a captured post-norm step; the tests on the CUDA stub check it."""
    if num_rows <= _FEW_ROWS:
        return 5 + 8 * num_decoder_layers
    return 4 + 12 * num_decoder_layers


def _launch_seconds(device: torch.device) -> float:
    """Measure the time per kernel in a replayed graph of trivial kernels; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    array, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    array += 1
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(_NUM_LAUNCHES):
            array += 1

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return least_seconds(replay) / _NUM_LAUNCHES


def _read_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second read by a sum over an array far larger than any cache."""
    array = torch.ones(1 << (29 if device.type == "cuda" else 24), device=device)
    return array.nbytes / least_seconds(lambda: array.sum().item())
