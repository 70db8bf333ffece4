"""The parts of `benchmarks.gpu_check` that check correctness; each returns its findings.

A part that detects an error raises `PartFailed` with its findings.
"""

from __future__ import annotations

import dataclasses
import resource
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from benchmarks.gpu_check.place import DTYPES, Place, greedy, requests_for
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Precision, Verb
from seq2seq_serve.export.exporter import TOLERANCES, export_bundle
from seq2seq_serve.export.graphs import weightless
from seq2seq_serve.server.engine.engine import Engine
from seq2seq_serve.server.engine.queue import QueueLimits
from seq2seq_serve.server.engine.records import Array, Search, Sequence, Turn
from seq2seq_serve.server.runner.device import ProviderPolicy
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.training.config import BOS_ID, EOS_ID
from seq2seq_serve.training.evaluation.search import greedy_search
from seq2seq_serve.training.models.transformer import Transformer

_WHOLLY_ON_DEVICE = {Verb.STEP.value, "greedy", "move"}
# Operators that ONNX Runtime deliberately keeps on the CPU: arithmetic on a few sizes.
_SHAPE_ARITHMETIC = {
    *("Add", "Cast", "Concat", "Div", "Gather", "Mod", "Mul", "Neg", "Range", "Reshape", "Shape", "Slice"),
    *("Squeeze", "Sub", "Unsqueeze"),
}
_COMPARED_SOURCES, _COMPARED_TARGET_LENGTH = 16, 12
_SETTLED_SHARE = 0.2  # share of the requests after which memory must not grow
_MAX_GROWTH_BYTES = 64 << 20  # less than the size of one more row for every slot


class PartFailed(Exception):
    """A part ran and detected an error.

    Args:
        message: Description of the error.
        found: All findings of the part.
    """

    def __init__(self, message: str, found: dict[str, Any]) -> None:
        super().__init__(message)
        self.found = found


def export(place: Place, precision: Precision) -> dict[str, Any]:
    """Export the model; the export verifies the bundle against torch."""
    path = place.folder / precision
    manifest = export_bundle(place.trained, path, [precision])
    place.bundles[precision] = path
    return {"proof": dataclasses.asdict(manifest.variants[precision].parity)}


def placement(place: Place) -> dict[str, Any]:
    """Find the operators of each graph that do not run on the device."""
    wanted = "CPUExecutionProvider" if place.scale.device == "cpu" else "CUDAExecutionProvider"
    files = {path.stem: path for path in sorted(weightless.FOLDER.glob("*.onnx"))}
    for precision in place.scale.precisions:
        if precision in place.bundles:
            graphs = load_bundle(place.bundles[precision]).manifest.variants[precision].graphs
            files |= {
                f"{precision} {verb}": place.bundles[precision] / spec.file.file
                for verb, spec in graphs.items()
            }
    elsewhere = {name: _operators_elsewhere(path, wanted) for name, path in files.items()}
    wrong = {
        name: sorted(operators)
        for name, operators in elsewhere.items()
        if (operators if name.split()[-1] in _WHOLLY_ON_DEVICE else operators.keys() - _SHAPE_ARITHMETIC)
    }
    found = {"not_on_the_device": {name: dict(operators) for name, operators in elsewhere.items()}}
    if wrong:
        raise PartFailed(f"these run on the CPU: {wrong}", found)
    return found


def _operators_elsewhere(path: Path, wanted: str) -> Counter[str]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(path, options, providers=[wanted])
    return Counter(
        node.op_type
        for subgraph in session.get_provider_graph_assignment_info()
        for node in subgraph.get_nodes()
        if subgraph.ep_name != wanted
    )


def parity(place: Place) -> dict[str, Any]:
    """Compare log-probabilities with float32 on the CPU and with torch on the device."""
    sources = place.sources(_COMPARED_SOURCES)
    targets = place.sources(_COMPARED_SOURCES, _COMPARED_TARGET_LENGTH)
    on_cpu = _scores(place.runner(Precision.FP32, len(sources), policy=ProviderPolicy.CPU), sources, targets)
    found: dict[str, Any] = {}
    wrong = []
    for precision in place.served:
        ours = _scores(place.runner(precision, len(sources)), sources, targets)
        others = {
            "cpu fp32": on_cpu,
            "torch float32": _torch_scores(place.model(), sources, targets),
            f"torch {precision}": _torch_scores(place.model(DTYPES[precision]), sources, targets),
        }
        differences = {name: float(np.abs(ours - scores).max()) for name, scores in others.items()}
        found[precision] = differences | {"tolerance": TOLERANCES[precision]}
        # in a short type, torch's own rounding error is added
        limits = {name: TOLERANCES[precision] * (2 if name.endswith(precision) else 1) for name in others}
        wrong += [
            f"{precision} and {name}" for name, worst in differences.items() if not worst <= limits[name]
        ]
    if wrong:
        raise PartFailed(f"too far apart: {', '.join(wrong)}", found)
    return found


def _scores(runner: OnnxRunner, sources: list[list[int]], targets: list[list[int]]) -> Array:
    """Returns the log-probabilities `(B, T)` of targets of equal length."""
    requests = [dataclasses.replace(request, is_score=True) for request in requests_for(sources, 1)]
    runner.encode(0, requests)
    rows = tuple(
        Sequence(Search(request, runner.start_ids), runner.start_ids[-1], token_ids=target[:-1])
        for request, target in zip(requests, targets, strict=True)
    )
    return np.array(runner.prefill(0, rows), np.float64)


@torch.inference_mode()
def _torch_scores(model: Transformer, sources: list[list[int]], targets: list[list[int]]) -> Array:
    device = model.embedding.weight.device
    rows = []
    for source, target in zip(sources, targets, strict=True):
        source_ids = torch.tensor([source], device=device)
        fed, labels = (torch.tensor([ids], device=device) for ids in ([BOS_ID, *target[:-1]], target))
        logits = model(source_ids, torch.ones_like(source_ids, dtype=torch.bool), fed)  # (1, T, V)
        scores = logits.float().log_softmax(-1).gather(2, labels[:, :, None])[0, :, 0]
        rows.append(scores.cpu().numpy())
    return np.stack(rows)


def tokens(place: Place) -> dict[str, Any]:
    """Compare served tokens with those of a reference greedy search; they may differ only at near ties."""
    num_tokens = place.scale.num_tokens
    sources = place.sources(max(place.scale.rows))
    model = place.model()
    oracle = greedy_search(model, sources, bos_id=BOS_ID, eos_id=EOS_ID, max_new_tokens=num_tokens)
    found: dict[str, Any] = {}
    wrong = []
    for precision in place.served:
        runner = place.runner(precision, len(sources))
        ours = [_until_end(ids) for ids in greedy(runner, sources, num_tokens)]
        gaps = [
            _gap(model, source, given, expected)
            for source, given, expected in zip(sources, ours, oracle, strict=True)
            if given != expected
        ]
        worst = max(gaps, default=0.0)
        found[precision] = {
            "requests": len(sources),
            "equal": len(sources) - len(gaps),
            "worst_gap_where_they_part": worst,
            "steps_were_captured": runner.captures_steps,
        }
        # each of the two log-probabilities may have an error of the tolerance
        if worst > 2 * TOLERANCES[precision]:
            wrong.append(precision)
    if wrong:
        raise PartFailed(f"tokens differ from the oracle's, not only at near ties: {', '.join(wrong)}", found)
    return found


def _until_end(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(EOS_ID)] if EOS_ID in token_ids else token_ids


@torch.inference_mode()
def _gap(model: Transformer, source: list[int], given: list[int], expected: list[int]) -> float:
    """Returns the oracle's log-probability minus ours for the first tokens that differ."""
    pairs = zip([*given, EOS_ID], [*expected, EOS_ID], strict=False)
    position = next(i for i, (a, b) in enumerate(pairs) if a != b)
    device = model.embedding.weight.device
    source_ids = torch.tensor([source], device=device)
    fed = torch.tensor([[BOS_ID, *expected[:position]]], device=device)
    logits = model(source_ids, torch.ones_like(source_ids, dtype=torch.bool), fed)[0, -1]
    theirs, ours = [*expected, EOS_ID][position], [*given, EOS_ID][position]
    return float(logits[theirs] - logits[ours])


def memory(place: Place) -> dict[str, Any]:
    """Run many requests of all lengths; the memory in use must stop growing."""
    scale = place.scale
    runner = place.runner(place.served[0], max(scale.rows))
    rng = np.random.default_rng(0)
    sources = place.sources(scale.num_requests)
    requests = requests_for(sources, 1)
    all_done = threading.Event()
    used_bytes: list[int] = []
    num_done = 0

    def deliver(turn: Turn) -> None:
        nonlocal num_done
        for _ in turn.results:
            num_done += 1
            if num_done % max(1, scale.num_requests // 20) == 0:
                used_bytes.append(_used_bytes(place.device))
        if num_done == scale.num_requests:
            all_done.set()

    limits = QueueLimits(max_waiting_requests=scale.num_requests, max_waiting_tokens=1 << 30)
    engine = Engine(runner, model_name="memory", deliver=deliver, queue_limits=limits)
    engine.start()
    for request in requests:
        engine.submit(dataclasses.replace(request, max_new_tokens=int(rng.integers(1, scale.num_tokens + 1))))
    finished = all_done.wait(120)
    engine.stop()
    settled = used_bytes[int(_SETTLED_SHARE * len(used_bytes)) :]
    growth = max(settled) - settled[0] if settled else 0
    found = {"requests": num_done, "used_mib": [n >> 20 for n in used_bytes], "growth_bytes": growth}
    if not finished:
        raise PartFailed(f"only {num_done} of {scale.num_requests} requests ended in time", found)
    if growth > _MAX_GROWTH_BYTES:
        raise PartFailed(f"memory grew by {growth >> 20} MiB after it should have settled", found)
    return found


def _used_bytes(device: torch.device) -> int:
    """Returns the memory in use on the whole device; on a CPU, the peak of this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
