"""Measures speed on a device: our runner, transformers and CTranslate2 with the same weights.

Measured: whole greedy requests, encoding included, without gRPC and scheduling, and the milliseconds of a
step with and without captured graphs. Contenders alternate within each round; medians over the rounds are
compared. The floor of a step is the time to start its kernels one after the other, plus the time to read the
bytes that it needs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.parts import PartFailed
from benchmarks.gpu_check.place import DTYPES, Place, Scale, greedy
from benchmarks.peers.transformers_peer import TransformersPeer
from benchmarks.peers.work import Search
from seq2seq_serve.training.config import BOS_ID
from seq2seq_serve.training.evaluation.search import greedy_search

_Contender = Callable[[list[list[int]], int], list[list[int]]]
_LEAST_EQUAL_SHARE = 0.9  # of a peer's float32 requests; near ties do not explain a lower share
_BAR_STEP_MS, _BAR_RATIO, _BAR_FLOORS = 0.5, 4.0, 2.0
_BAR_STEP_ROWS, _BAR_RATIO_ROWS, _BAR_FLOOR_ROWS = 1, 64, 256
_OURS, _UNCAPTURED, _GENERATE, _STATIC = "ours {}", "ours {} uncaptured", "generate", "generate static"
_KERNELS_OF_A_LAYER, _OTHER_KERNELS = 12, 9
_NUM_LAUNCHES = 1000
_STATIC_ROWS = (1, _BAR_RATIO_ROWS)  # transformers compiles for each number, which takes tens of seconds


def speed(place: Place) -> dict[str, Any]:
    """Measure milliseconds per step and tokens per second of every contender at every number of rows."""
    scale = place.scale
    sources = place.sources(max(scale.rows), scale.source_length)
    steps: dict[tuple[str, int], list[float]] = {}
    contenders, is_captured = _ours(place, steps)
    peers, equal, missing = _peers(place, sources)
    contenders |= peers
    seconds: dict[tuple[str, int], list[float]] = {}
    for round_number in range(scale.num_rounds + 1):
        for num_rows in scale.rows:
            for name in list(contenders):
                if name == _STATIC and num_rows not in _STATIC_ROWS:
                    continue
                started = time.perf_counter()
                try:
                    contenders[name](sources[:num_rows], scale.num_tokens)
                except Exception as error:  # a peer's compiler or memory; the others continue
                    missing[name] = f"failed at {num_rows} rows: {error!r}"[:500]
                    del contenders[name]
                    continue
                if round_number > 0:  # the first one is warm-up
                    seconds.setdefault((name, num_rows), []).append(time.perf_counter() - started)
    bandwidth = read_bandwidth(place.device)
    launches_seconds = step_kernels(scale.model.num_decoder_layers) * launch_seconds(place.device)
    rows = []
    for (name, num_rows), taken in seconds.items():
        precision = next((p for p in place.served if p in name.split()), scale.precisions[0])
        reading_seconds = step_bytes(scale, DTYPES[precision].itemsize, num_rows) / bandwidth
        floor_ms = 1e3 * (launches_seconds + reading_seconds)
        row = {"contender": name, "rows": num_rows, "floor_ms": floor_ms}
        row["tokens_per_second"] = num_rows * scale.num_tokens / statistics.median(taken)
        if (name, num_rows) in steps:
            row["step_ms"] = 1e3 * statistics.median(steps[name, num_rows])
        rows.append(row)
    found = {
        "bandwidth_bytes_per_second": bandwidth,
        "launches_ms": 1e3 * launches_seconds,
        "captured": is_captured,
        "equal_float32_requests": equal,
        "missing": missing,
        "results": rows,
    }
    wrong = [name for name, captured in is_captured.items() if not captured and place.device.type == "cuda"]
    wrong += [name for name in missing if name.startswith("ours")]
    wrong += [name for name, share in equal.items() if share[0] < _LEAST_EQUAL_SHARE * share[1]]
    if wrong:
        raise PartFailed(f"not captured, failed, or tokens that differ: {', '.join(wrong)}", found)
    return found


def _ours(
    place: Place, steps: dict[tuple[str, int], list[float]]
) -> tuple[dict[str, _Contender], dict[str, bool]]:
    contenders: dict[str, _Contender] = {}
    is_captured = {}
    for precision in place.served:
        for label, cuda_graphs in ((_OURS, True), (_UNCAPTURED, False)):
            name = label.format(precision)
            runner = place.runner(precision, max(place.scale.rows), cuda_graphs=cuda_graphs)
            if cuda_graphs:
                is_captured[name] = runner.captures_steps

            def run(
                sources: list[list[int]], num_tokens: int, *, runner: Any = runner, name: str = name
            ) -> list[list[int]]:
                taken = steps.setdefault((name, len(sources)), [])
                return greedy(runner, sources, num_tokens, taken)

            contenders[name] = run
    return contenders, is_captured


def _peers(
    place: Place, sources: list[list[int]]
) -> tuple[dict[str, _Contender], dict[str, tuple[int, int]], dict[str, str]]:
    """Returns the installed peers, their numbers of targets equal to the oracle's, and others' errors."""
    makers: dict[str, Callable[[Place, torch.dtype], _Contender]] = {
        _GENERATE: partial(_transformers, is_static=False),
        _STATIC: partial(_transformers, is_static=True),
        "ctranslate2": _ctranslate2,
    }
    num_tokens = place.scale.num_tokens
    oracle = greedy_search(place.model(), sources, bos_id=BOS_ID, eos_id=-1, max_new_tokens=num_tokens)
    contenders: dict[str, _Contender] = {}
    equal: dict[str, tuple[int, int]] = {}
    missing: dict[str, str] = {}
    short = DTYPES[place.scale.precisions[0]]
    for name, make in makers.items():
        try:
            if name != _STATIC:  # it has the same weights as `generate`, and is slow to compile
                given = make(place, torch.float32)(sources, num_tokens)
                num_equal = sum(a == b for a, b in zip(given, oracle, strict=True))
                equal[name] = (num_equal, len(sources))
            contenders[name] = make(place, short)
        except Exception as error:  # not installed, or it does not support this device
            missing[name] = repr(error)[:500]
    return contenders, equal, missing


def _transformers(place: Place, dtype: torch.dtype, *, is_static: bool) -> _Contender:
    from benchmarks.peers.marian import as_marian  # only where it is installed

    peer = TransformersPeer(as_marian(place.trained.model, place.device, dtype), is_static=is_static)
    return lambda sources, num_tokens: peer.generate(sources, Search(1, num_tokens, num_tokens))


def _ctranslate2(place: Place, dtype: torch.dtype) -> _Contender:
    from benchmarks.peers.ctranslate2_peer import CTranslate2Peer, convert  # only where it is installed

    path = place.folder / "ctranslate2"
    tokens = convert(place.trained.model, path)
    compute_type = str(dtype).removeprefix("torch.")
    return CTranslate2Peer(path, tokens, compute_type, 1, 0, device=place.device.type).greedy


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


def bars(place: Place, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns each bar with its measured value; `is_met` is None if there is no value."""
    by_name = {(row["contender"], row["rows"]): row for row in found["results"]}
    ours = _OURS.format(place.scale.precisions[0])
    step = by_name.get((ours, _BAR_STEP_ROWS), {}).get("step_ms")
    rate = by_name.get((ours, _BAR_RATIO_ROWS), {}).get("tokens_per_second")
    theirs = [
        row["tokens_per_second"]
        for (name, num_rows), row in by_name.items()
        if name.startswith(_GENERATE) and num_rows == _BAR_RATIO_ROWS
    ]
    large = by_name.get((ours, _BAR_FLOOR_ROWS), {})
    measured = (
        (f"ms of a captured step at {_BAR_STEP_ROWS} row", "at most", _BAR_STEP_MS, step),
        (
            f"times the tokens/s of the faster `generate` at {_BAR_RATIO_ROWS} rows",
            "at least",
            _BAR_RATIO,
            rate / max(theirs) if rate and theirs else None,
        ),
        (
            f"times its floor that a step takes at {_BAR_FLOOR_ROWS} rows",
            "at most",
            _BAR_FLOORS,
            large["step_ms"] / large["floor_ms"] if large else None,
        ),
    )
    return [
        {
            "bar": what,
            side: limit,
            "measured": value,
            "is_met": None if value is None else value <= limit if side == "at most" else value >= limit,
        }
        for what, side, limit, value in measured
    ]
