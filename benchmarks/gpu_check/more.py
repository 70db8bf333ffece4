"""The other parts of `benchmarks.gpu_check`: memory, training, and the tests marked `gpu`."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_check.place import Findings, Place, requests_for
from benchmarks.load.engine import DrivenEngine, thread_engine
from seq2seq_serve.server.engine.request import Beam
from seq2seq_serve.server.engine.result import Turn

_ROOT = Path(__file__).parents[2]
_SETTLED_SHARE = 0.3  # share of the requests after which memory must not grow
_MAX_GROWTH_BYTES = 64 << 20  # less than the size of one more row for every slot
_BEAM_SIZE, _BEAM_SHARE = 4, 5  # every fifth request of the memory check is a beam


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

    engine = DrivenEngine(thread_engine(runner, note))
    started = time.perf_counter()
    engine.decode(requests)
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
