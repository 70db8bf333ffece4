"""The first parts of `benchmarks.gpu_check design`: they time the choices for creating sessions.

`benchmarks.gpu_check.kernels` times each choice in a separate process, on graphs of the model that are not
verified like those of a bundle. This module does not use torch's device.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import PartFailed
from benchmarks.gpu_check.place import Place
from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.names import Verb
from seq2seq_serve.export import convert
from seq2seq_serve.export.exporter import make_graphs

_ROOT = Path(__file__).parents[2]
_FAST = names.CUDA_PROVIDER_OPTIONS["sdpa_kernel"]
_SDPA_KERNELS = {"cudnn": "8", "flash": _FAST}
_XQA = {"xqa": "1", "flash": "0"}
_MAX_SECONDS = 60.0  # time limit of one process


def graphs(place: Place) -> dict[str, Any]:
    """Convert `encode` and `step` in the scale's first precision."""
    place.graphs.mkdir()
    modules = make_graphs(place.trained, place.scale.precisions[0])
    models = {verb: convert.convert(modules[verb]) for verb in (Verb.ENCODE, Verb.STEP)}
    convert.save(models, place.graphs)
    return {"precision": place.scale.precisions[0]}


def attention(place: Place) -> dict[str, Any]:
    """Time `encode` at new shapes, with cuDNN's attention and without it."""
    shapes = place.scale.encode_shapes
    timed, failed = {}, {}
    for name, kernels in _SDPA_KERNELS.items():
        try:
            timed[name] = _timed(place, Verb.ENCODE, shapes, kernels)
        except (subprocess.SubprocessError, ValueError) as error:
            failed[name] = str(error)
    results = [{"rows": rows, "source_length": length} for rows, length in shapes]
    medians = {}
    for name, times in timed.items():
        for key in ("first_ms", "second_ms"):
            medians[f"{name} {key}"] = round(statistics.median(time[key] for time in times), 3)
            for result, time in zip(results, times, strict=True):
                result[f"{name} {key}"] = time[key]
    return _found({"medians": medians, "results": results}, failed)


def steps(place: Place) -> dict[str, Any]:
    """Time a step with XQA and with flash attention, captured and not, and count rows with equal tokens."""
    shapes = tuple((rows, place.scale.source_length) for rows in place.scale.rows)
    results: list[dict[str, Any]] = [{"rows": rows} for rows, _ in shapes]
    failed = {}
    expected: list[list[int]] = []
    for name, is_used in _XQA.items():
        try:
            times = _timed(place, Verb.STEP, shapes, _FAST, ORT_ENABLE_XQA=is_used)
        except (subprocess.SubprocessError, ValueError) as error:
            failed[name] = str(error)
            continue
        expected = expected or [time["token_ids"] for time in times]
        for result, time, token_ids in zip(results, times, expected, strict=True):
            for key in ("", "captured_"):
                if f"{key}ms" in time:
                    result[f"{name} {key}ms"] = time[f"{key}ms"]
                    pairs = zip(token_ids, time[f"{key}token_ids"], strict=True)
                    result["equal_tokens"] = min(
                        result.get("equal_tokens", result["rows"]), sum(a == b for a, b in pairs)
                    )
    return _found({"results": results}, failed)


def _found(found: dict[str, Any], failed: dict[str, str]) -> dict[str, Any]:
    if failed:
        raise PartFailed(f"these could not be timed: {failed}", found)
    return found


def _timed(
    place: Place, verb: Verb, shapes: tuple[tuple[int, int], ...], sdpa_kernels: str, **environment: str
) -> list[dict[str, Any]]:
    """Time a graph in a separate process; returns a record for each shape.

    Raises:
        subprocess.SubprocessError: The process failed, or took too long.
        ValueError: Its output is not JSON.
    """
    flags = ["--device", place.scale.device, "--sdpa-kernel", sdpa_kernels]
    flags += ["--shapes", ",".join(f"{rows}x{length}" for rows, length in shapes)]
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_check.kernels",
        str(place.graphs / f"{verb}.onnx"),
        *flags,
    ]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        check=True,
        timeout=_MAX_SECONDS,
        cwd=_ROOT,
        env=os.environ | environment,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
