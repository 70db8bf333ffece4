"""The parts of `benchmarks.gpu_check` that check what is computed: placement, tokens, log-probabilities."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from benchmarks.gpu_check.place import BASE, DTYPES, Findings, Place, greedy, requests_for
from benchmarks.load.engine import DrivenEngine, settings_of, thread_engine
from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.cuda_libraries import load_cuda_libraries
from seq2seq_serve.bundle.manifest import Manifest, load_bundle
from seq2seq_serve.bundle.names import Axis, Precision, Verb
from seq2seq_serve.export.exporter import TOLERANCES
from seq2seq_serve.export.graphs import weightless
from seq2seq_serve.server.config import ProviderPolicy
from seq2seq_serve.server.engine.request import Array, Beam, Request, Sampling
from seq2seq_serve.server.engine.result import Result
from seq2seq_serve.server.engine.state import Search, Sequence
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import source_specs
from seq2seq_serve.training.config import BOS_ID
from seq2seq_serve.training.models.transformer import Transformer

_WHOLLY_ON_DEVICE = {Verb.STEP.value, "greedy", "move"}
# Operators that ONNX Runtime deliberately keeps on the CPU: arithmetic on a few sizes.
_SHAPE_ARITHMETIC = {
    *("Add", "Cast", "Concat", "Div", "Expand", "Gather", "MemcpyFromHost", "Mod", "Mul", "Neg", "Range"),
    *("Reshape", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze"),
}
_COMPARED_SOURCES, _COMPARED_TARGET_LENGTH = 16, 12
_FAMILY_REQUESTS, _FAMILY_TOKENS = 6, 12


def device(place: Place, found: Findings) -> str:
    """Report versions and the card; find the operators that do not run on it; run one step."""
    found["versions"] = {"onnxruntime": ort.__version__, "torch": torch.__version__}
    if place.scale.on_cuda:
        found["card"] = _card()
        found["libraries"] = load_cuda_libraries(None)
    precision = place.scale.precisions[0]
    started = time.perf_counter()
    runner = place.runner(precision, max(place.scale.rows))
    found["load_and_warm_up_seconds"] = round(time.perf_counter() - started, 2)
    [found["first_tokens"]] = greedy(runner, place.sources(1), 2)
    found["captured"] = runner.captures_steps
    runner.close()
    wanted = "CUDAExecutionProvider" if place.scale.on_cuda else "CPUExecutionProvider"
    files = {path.stem: path for path in sorted(weightless.FOLDER.glob("*.onnx"))}
    bundle = place.folder / BASE
    graphs = load_bundle(bundle).manifest.variants[precision].graphs
    files |= {f"{precision} {verb}": bundle / spec.file.file for verb, spec in graphs.items()}
    elsewhere = {name: _operators_elsewhere(path, wanted) for name, path in files.items()}
    found["not_on_the_device"] = {name: dict(operators) for name, operators in elsewhere.items() if operators}
    wrong = {
        name: sorted(operators)
        for name, operators in elsewhere.items()
        if (operators if name.split()[-1] in _WHOLLY_ON_DEVICE else operators.keys() - _SHAPE_ARITHMETIC)
    }
    problems = [f"these run on the CPU: {wrong}"] if wrong else []
    if place.scale.on_cuda and not found["captured"]:
        problems.append("steps are not captured")
    return "; ".join(problems)


def _card() -> list[str]:
    query = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.draw"
    try:
        command = ["nvidia-smi", query, "--format=csv"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    except OSError as error:
        return [str(error)]


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


def tokens(place: Place, found: Findings) -> str:
    """Compare the first precision with torch in float32: tokens, log-probabilities, captured and not."""
    return _compare_with_torch(place, found, place.scale.precisions[0])


def other_precisions(place: Place, found: Findings) -> str:
    """The same for the other precisions."""
    problems = []
    for precision in place.scale.precisions[1:]:
        each: dict[str, Any] = {}
        problems.append(_compare_with_torch(place, each, precision))
        found[precision] = each
    return "; ".join(filter(None, problems))


def _compare_with_torch(place: Place, found: dict[str, Any], precision: Precision) -> str:
    scale, tolerance = place.scale, TOLERANCES[precision]
    sources = place.sources(_COMPARED_SOURCES)
    targets = place.sources(_COMPARED_SOURCES, _COMPARED_TARGET_LENGTH)
    problems = []
    runner = place.runner(precision, max(*scale.rows, len(sources)))
    ours = _scores(runner, sources, targets)
    # in a short type, torch's own rounding error is added
    for name, dtype, limit in (
        ("torch float32", torch.float32, tolerance),
        (f"torch {precision}", DTYPES[precision], 2 * tolerance),
    ):
        difference = np.abs(ours - _torch_scores(place.model(dtype), sources, targets))
        found[f"worst and mean difference from {name}"] = [float(difference.max()), float(difference.mean())]
        if not difference.max() <= limit:
            problems.append(f"{precision} differs from {name} by {difference.max():.2g}, of {limit} allowed")
    num_tokens = scale.num_tokens
    sources = place.sources(max(scale.rows))
    # Random tokens are fed: a random model soon repeats its own.
    fed = place.sources(len(sources), num_tokens)
    served = greedy(runner, sources, num_tokens, fed=fed)
    selected = {
        "captured": served,
        "captured again": greedy(runner, sources, num_tokens, fed=fed),
        "alone": [
            greedy(runner, sources[i : i + 1], num_tokens, fed=fed[i : i + 1])[0]
            for i in range(len(sources[:8]))
        ],
        "own tokens fed": greedy(runner, sources[:8], num_tokens),
    }
    found["captured"] = runner.captures_steps
    runner.close()
    uncaptured = place.runner(precision, len(sources), cuda_graphs=False)
    selected["uncaptured"] = greedy(uncaptured, sources, num_tokens, fed=fed)
    if selected["captured again"] != served:
        problems.append("tokens differ when repeated")
    model = place.model()
    for name, targets in selected.items():
        context = targets if name.startswith("own") else fed
        gaps = _gaps(model, sources[: len(targets)], context[: len(targets)], targets)
        found[name] = {
            "tokens": int(gaps.size),
            "equal_to_captured": int(np.sum(np.array(targets) == np.array(served[: len(targets)]))),
            "equal_to_torch_float32": int(np.sum(gaps == 0)),
            "different_tokens": len(set(np.ravel(targets).tolist())),
            "worst_gap": float(gaps.max()),
        }
        # each of the two log-probabilities may have an error of the tolerance
        if not gaps.max() <= 2 * tolerance:
            problems.append(f"{name}: tokens in {precision} differ from torch's, not only at near ties")
    return "; ".join(problems)


def _scores(runner: OnnxRunner, sources: list[list[int]], targets: list[list[int]]) -> Array:
    """Returns the log-probability of every target token, `(B, T)`."""
    requests = [replace(request, is_score=True) for request in requests_for(sources, 1)]
    runner.encode(0, requests)
    rows = tuple(
        Sequence(Search(request, runner.start_ids), runner.start_ids[-1], token_ids=target[:-1])
        for request, target in zip(requests, targets, strict=True)
    )
    return np.array(runner.prefill(0, rows), np.float64)


@torch.inference_mode()
def _logits(model: Transformer, source: list[int], fed: list[int]) -> torch.Tensor:
    """Returns torch's logits after the start token and each token that is fed but the last, `(T, V)`."""
    device = model.embedding.weight.device
    source_ids = torch.tensor([source], device=device)
    fed_ids = torch.tensor([[BOS_ID, *fed[:-1]]], device=device)
    logits: torch.Tensor = model(source_ids, torch.ones_like(source_ids, dtype=torch.bool), fed_ids)[0]
    return logits.float().cpu()


def _torch_scores(model: Transformer, sources: list[list[int]], targets: list[list[int]]) -> Array:
    rows = []
    for source, target in zip(sources, targets, strict=True):
        scores = _logits(model, source, target).log_softmax(-1)
        rows.append(scores.gather(1, torch.tensor(target)[:, None])[:, 0].numpy())
    return np.stack(rows)


def _gaps(
    model: Transformer, sources: list[list[int]], fed: list[list[int]], targets: list[list[int]]
) -> Array:
    """Returns the largest logit of torch minus that of the selected token, `(B, T)`; 0 where they agree."""
    gaps = []
    for source, context, target in zip(sources, fed, targets, strict=True):
        logits = _logits(model, source, context)
        chosen = logits.gather(1, torch.tensor(target)[:, None])[:, 0]
        gaps.append((logits.amax(1) - chosen).numpy())
    return np.stack(gaps)


def families(place: Place, found: Findings) -> str:
    """Compare each imported or recurrent bundle with its float32 on the CPU, through the engine.

    The CPU's targets are scored at once, and decoded step by step.
    """
    from benchmarks.gpu_check.prepare import FAMILIES

    precision = Precision.FP16 if place.scale.on_cuda else Precision.FP32
    tolerance = TOLERANCES[precision]
    problems = []
    for name in FAMILIES:
        manifest = load_bundle(place.folder / name).manifest
        asked = _family_requests(manifest)
        served = _answers(place, name, precision, None, asked)
        reference = _answers(place, name, Precision.FP32, ProviderPolicy.CPU, asked)
        scored = [
            replace(request, prefix_ids=result.best.token_ids, is_score=True)
            for request, result in zip(asked["greedy"], reference["greedy"], strict=True)
        ]
        on_cpu = _answers(place, name, Precision.FP32, ProviderPolicy.CPU, {"score": scored})["score"]
        here = _answers(place, name, precision, None, {"score": scored})["score"]
        errors = {"scores": _worst(here, on_cpu), "steps": _worst(served["greedy"], reference["greedy"])}
        equal = {
            f"{mode}: equal targets": sum(
                one.best.token_ids == other.best.token_ids
                for one, other in zip(served[mode], reference[mode], strict=True)
            )
            for mode in asked
        }
        worst = {f"worst difference of {kind} from float32": error for kind, error in errors.items()}
        found[name] = worst | {"tolerance": tolerance} | equal | {"of": len(asked["greedy"])}
        problems += [
            f"{name}: {kind} differs by {error:.2g}"
            for kind, error in errors.items()
            if not error <= tolerance
        ]
    return "; ".join(problems)


def _family_requests(manifest: Manifest) -> dict[str, list[Request]]:
    """Returns requests of every mode for random sources of the family."""
    rng = np.random.default_rng(0)
    greedy = []
    for i in range(_FAMILY_REQUESTS):
        [(name, form)] = manifest.sources.items()
        length = 4 + 3 * i
        source: Array = rng.integers(4, 290, length)
        if form is names.Form.SOUND:
            [spec] = source_specs(manifest, Precision.FP32)
            source = rng.uniform(-1, 1.5, spec.shape({Axis.BATCH: 1})[1:]).astype(np.float32)
        memory_length = manifest.memory.memory_length({name: len(source)})
        request = Request(
            str(i), {name: source}, memory_length, _FAMILY_TOKENS, time.monotonic(), **settings_of(manifest)
        )
        greedy.append(replace(request, log_probabilities=True))
    return {
        "greedy": greedy,
        "plain": [replace(one, log_probabilities=False) for one in greedy],
        "beam": [replace(one, beam=Beam(4)) for one in greedy],
        "sampling": [replace(one, sampling=Sampling(1.0, 0, 1.0, 0.0, i)) for i, one in enumerate(greedy)],
    }


def _answers(
    place: Place,
    name: str,
    precision: Precision,
    policy: ProviderPolicy | None,
    asked: dict[str, list[Request]],
) -> dict[str, list[Result]]:
    """Decode all requests at once, as they share a running batch."""
    runner = place.runner(precision, 4 * _FAMILY_REQUESTS, name=name, policy=policy)
    engine = DrivenEngine(thread_engine(runner))
    # A runner forgets the sounds and pictures of a request once it has encoded them.
    requests = [replace(one, sources=dict(one.sources)) for requests in asked.values() for one in requests]
    answers = iter(engine.decode(requests))
    engine.stop()
    return {mode: [next(answers) for _ in requests] for mode, requests in asked.items()}


def _worst(ours: list[Result], others: list[Result]) -> float:
    """Returns the largest difference of a log-probability, up to the first token that differs."""
    worst = 0.0
    for one, other in zip(ours, others, strict=True):
        for i, (a, b) in enumerate(zip(one.best.choices, other.best.choices, strict=False)):
            if one.best.token_ids[:i] == other.best.token_ids[:i]:
                worst = max(worst, abs(a.log_probability - b.log_probability))
    return worst
