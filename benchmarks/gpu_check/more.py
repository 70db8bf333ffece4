"""The other parts of `benchmarks.gpu_check`: memory, training, and the tests marked `gpu`."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_check.place import Findings, Place, requests_for
from benchmarks.load.engine import DrivenEngine, thread_engine
from seq2seq_serve.server.engine.request import Beam

_ROOT = Path(__file__).parents[2]
_NUM_READINGS = 15  # of the memory; after a third of them it must not grow
_MAX_GROWTH_MIB = 64  # less than the size of one more row for every slot
_BEAM_SIZE, _BEAM_SHARE = 4, 5  # every fifth request of the memory check is a beam
_LEAST_RATIO = 1.1  # bar of training
_TINY_TRAINING = ["--presets", "tiny", "--steps", "1", "--batch-tokens", "200"]


def memory(place: Place, found: Findings) -> Iterator[str]:
    """Run many requests of all lengths; the memory in use must stop growing."""
    scale = place.scale
    before = _used_bytes(scale.on_cuda)
    runner = place.runner(scale.precisions[0], max(*scale.rows, _BEAM_SIZE))
    found["mib_of_weights_buffers_sessions"] = (_used_bytes(scale.on_cuda) - before) >> 20
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, scale.model.max_source_length, scale.num_requests)
    requests = [
        replace(
            request,
            max_new_tokens=int(rng.integers(1, scale.num_tokens + 1)),
            beam=None if number % _BEAM_SHARE else Beam(_BEAM_SIZE),
        )
        for number, request in enumerate(requests_for([place.sources(1, int(n))[0] for n in lengths], 1))
    ]
    engine, used_mib = DrivenEngine(thread_engine(runner)), list[int]()
    for start in range(0, len(requests), len(requests) // _NUM_READINGS):
        engine.decode(requests[start : start + len(requests) // _NUM_READINGS])
        used_mib.append((_used_bytes(scale.on_cuda) - before) >> 20)
    engine.stop()
    found["used_mib"] = used_mib
    settled = used_mib[_NUM_READINGS // 3 :]
    found["growth_mib"] = growth = max(settled) - settled[0]
    if growth > _MAX_GROWTH_MIB:
        yield f"memory grew by {growth} MiB after it should have settled"


def _used_bytes(on_cuda: bool) -> int:
    """Returns the memory in use on the whole device; on a CPU, the peak of this process."""
    if on_cuda:
        free, total = torch.cuda.mem_get_info()
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def training(place: Place, found: Findings) -> Iterator[str]:
    """Measure tokens per second of `base` in bf16 and of a plain loop, and the model FLOPs utilisation."""
    command = ["benchmarks.training_speed", "--rounds", "2"]
    command += ["--presets", "base", "--steps", "5"] if place.scale.on_cuda else _TINY_TRAINING
    done = _module(command)
    found["rows"] = rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    ratio = max(row["ratio"] for row in rows)
    if place.scale.on_cuda and ratio < _LEAST_RATIO:
        yield f"training has {ratio:.2f} times the plain loop's tokens/s (bar {_LEAST_RATIO})"


def tests(place: Place, found: Findings) -> Iterator[str]:
    """Run the tests marked `gpu`; files without such tests are not collected, since they need more packages.

    Warnings are not errors and plugins are off, because the machine's packages differ from our environment.
    """
    options = ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--tb", "short"]
    options += [] if place.scale.on_cuda else ["--collect-only"]
    done = _module(["pytest", *options, *gpu_test_files()], PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    found["end"] = lines = done.stdout.splitlines()[-60:]
    if done.returncode:
        yield f"exit code {done.returncode}: {lines[-1] if lines else ''}"


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
