"""The other parts of `benchmarks.gpu_check`: memory, other kernels, the tests marked `gpu`, training."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.place import BASE, Findings, Place, requests_for
from benchmarks.load.inprocess import InProcessEngine
from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.names import Verb
from seq2seq_serve.server.engine.request import Beam
from seq2seq_serve.server.engine.result import Turn

_ROOT = Path(__file__).parents[2]
_SETTLED_SHARE = 0.3  # share of the requests after which memory must not grow
_MAX_GROWTH_BYTES = 64 << 20  # less than the size of one more row for every slot
_BEAM_SIZE, _BEAM_SHARE = 4, 5  # every fifth request of the memory check is a beam
_FAST = names.CUDA_PROVIDER_OPTIONS["sdpa_kernel"]
_SDPA_KERNELS = {"cudnn": "8", "flash": _FAST}
_XQA = {"xqa": "1", "flash": "0"}
_PROCESS_SECONDS = 30.0


def memory(place: Place, found: Findings) -> str:
    """Run many requests of all lengths; the memory in use must stop growing."""
    scale = place.scale
    before = _used_bytes(scale.on_cuda)
    runner = place.runner(scale.precisions[0], max(*scale.rows, _BEAM_SIZE))
    found["bytes of a slot, slots"] = [runner.slot_bytes, runner.num_slots]
    found["mib of weights, buffers and sessions"] = (_used_bytes(scale.on_cuda) - before) >> 20
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, scale.model.max_source_length, scale.num_requests)
    sources = [place.sources(1, int(length))[0] for length in lengths]
    requests = [
        replace(
            request,
            max_new_tokens=int(rng.integers(1, scale.num_tokens + 1)),
            beam=None if number % _BEAM_SHARE else Beam(_BEAM_SIZE),
        )
        for number, request in enumerate(requests_for(sources, 1))
    ]
    used_bytes: list[int] = []
    num_done, interval = 0, max(1, scale.num_requests // 20)

    def note(turn: Turn) -> None:
        nonlocal num_done
        num_before, num_done = num_done, num_done + sum(each.result is not None for each in turn.updates)
        if num_done // interval > num_before // interval:
            used_bytes.append(_used_bytes(scale.on_cuda))

    engine = InProcessEngine(runner, note)
    started = time.perf_counter()
    engine.decode(requests, len(requests))
    found["seconds"] = time.perf_counter() - started
    engine.stop()
    settled = used_bytes[int(_SETTLED_SHARE * len(used_bytes)) :]
    found["requests"] = num_done
    found["used_mib"] = [(used - before) >> 20 for used in used_bytes]
    found["growth_bytes"] = growth = max(settled) - settled[0] if settled else 0
    if growth > _MAX_GROWTH_BYTES:
        return f"memory grew by {growth >> 20} MiB after it should have settled"
    return ""


def _used_bytes(on_cuda: bool) -> int:
    """Returns the memory in use on the whole device; on a CPU, the peak of this process."""
    if on_cuda:
        free, total = torch.cuda.mem_get_info()
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def alternatives(place: Place, found: Findings) -> str:
    """Time kernels of attention: cuDNN's when a source has a new shape, and XQA's in steps.

    Each choice has a process of its own, because ONNX Runtime reads its environment once, and cuDNN keeps its
    plans.
    """
    shapes = tuple((rows, place.scale.source_length) for rows in place.scale.rows)
    problems = []
    choices: list[tuple[str, Verb, tuple[tuple[int, int], ...], str, dict[str, str]]] = [
        *((name, Verb.STEP, shapes, _FAST, {"ORT_ENABLE_XQA": used}) for name, used in _XQA.items()),
        *((name, Verb.ENCODE, place.scale.encode_shapes, bits, {}) for name, bits in _SDPA_KERNELS.items()),
    ]
    for name, verb, measured, kernels, environment in choices:
        try:
            times = _timed(place, verb, measured, kernels, environment)
        except (subprocess.SubprocessError, ValueError) as error:
            problems.append(f"{verb} with {name}: {error}"[:300])
            continue
        found[f"{verb} with {name}"] = [
            {key: value for key, value in time.items() if not key.endswith("token_ids")} for time in times
        ]
        if verb is Verb.ENCODE:
            found[f"{verb} with {name}, medians"] = {
                key: statistics.median(time[key] for time in times) for key in ("first_ms", "second_ms")
            }
        else:
            found[f"tokens with {name}"] = [time["token_ids"][:8] for time in times]
    return "; ".join(problems)


def _timed(
    place: Place, verb: Verb, shapes: tuple[tuple[int, int], ...], kernels: str, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """Time a graph in a separate process; returns a record for each shape.

    Raises:
        subprocess.SubprocessError: The process failed, or took too long.
        ValueError: Its output is not JSON.
    """
    graph = place.folder / BASE / place.scale.precisions[0] / f"{verb}.onnx"
    command = [sys.executable, "-m", "benchmarks.gpu_check.kernels", str(graph)]
    command += ["--device", place.scale.device, "--sdpa-kernel", kernels]
    command += ["--shapes", ",".join(f"{rows}x{length}" for rows, length in shapes)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        check=True,
        timeout=_PROCESS_SECONDS,
        cwd=_ROOT,
        env=os.environ | environment,
    )
    records: list[dict[str, Any]] = json.loads(done.stdout)
    return records


def training(place: Place, found: Findings) -> str:
    """Measure tokens per second of `base` and of a plain loop, and the model FLOPs utilisation."""
    preset, steps = ("base", "5") if place.scale.on_cuda else ("tiny", "1")
    command = ["benchmarks.training_speed", "--presets", preset, "--steps", steps, "--rounds", "2"]
    if not place.scale.on_cuda:
        command += ["--batch-tokens", "200"]
    done = _module(command)
    lines = done.stdout.splitlines()
    if not lines:
        return f"exit code {done.returncode}"
    found["rows"] = json.loads(lines[-1])["rows"]
    return "slower than the plain loop" if done.returncode and place.scale.on_cuda else ""


def tests(place: Place, found: Findings) -> str:
    """Run the tests marked `gpu`; files without such tests are not collected, since they need more packages.

    Warnings are not errors and plugins are off, because the machine's packages differ from our environment.
    """
    found["files"] = files = gpu_test_files()
    options = ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--tb", "short"]
    options += [] if place.scale.on_cuda else ["--collect-only"]
    done = _module(["pytest", *options, *files], PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    lines = done.stdout.splitlines() or [f"exit code {done.returncode}"]
    found["summary"] = lines[-1]
    found["failed"] = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    found["end"] = lines[-60:] if done.returncode else []
    return lines[-1] if done.returncode else ""


def gpu_test_files() -> list[str]:
    """Returns the test files that contain a test marked `gpu`."""
    files = sorted((_ROOT / "tests").rglob("test_*.py"))
    marked = [file for file in files if "pytest.mark.gpu\n" in file.read_text(encoding="utf-8")]
    return [str(file.relative_to(_ROOT)) for file in marked]


def _module(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module with this interpreter, and print its standard output on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
        cwd=_ROOT,
        env=os.environ | environment,
    )
    print(done.stdout, file=sys.stderr)
    return done
