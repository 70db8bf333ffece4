"""Compares the engine with CTranslate2 and transformers' `generate`: `python -m benchmarks.peers`.

All contenders have the same weights. Measured: whole requests, encoding included, that arrive all at once,
without gRPC. The works are:

* a `base` Transformer with random weights (V = 32,000), greedy and with beams: few requests (20 source
  tokens, exactly 32 target tokens), and 1,000 sentences with the lengths of Multi30k's;
* if a corpus and a run are given, the test set of Multi30k, each sentence to its last token, with the
  sacreBLEU of every contender.

With `--imported` they are checkpoints of Hugging Face with random weights, in the sizes of published ones and
with their settings of `generate`. (`benchmarks.speech` has Whisper.)

Precisions are fp32, int8 and int4, which is compared with CTranslate2's int8; transformers has fp32 only.
The engine runs with two settings (instances x threads per instance), and so does CTranslate2 (inter_threads x
intra_threads). The faster setting of each counts.

First the tokens are compared: our fp32 with the fp32 of each peer, and others with the fp32 of the same
library. Then all contenders alternate within each round, and medians over the rounds are compared; work that
takes less than a second is repeated in its turn. The machine's speed varies over time, so only ratios within
one run are meaningful.

Each setting of the engine has a process of its own, in place of the server's. As there, several instances are
processes beside it, and one is a thread. The time to send sources and targets between processes counts as the
engine's.

Also reported: milliseconds per step, the share of the time outside encode calls and steps ("python"), and the
floor of a step, which `benchmarks.floors` computes from measurements in the same run.

Not measured: tokenization, gRPC, waiting. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.flags import positive
from benchmarks.floors import Machine, measure_machine, step_seconds, step_size
from benchmarks.hardware import describe_hardware
from benchmarks.load.engine import settings_of
from benchmarks.peers.our_engine import EngineProcess
from benchmarks.peers.report import Turns, compared, equal_targets, medians, speed_table, summarise
from benchmarks.peers.work import (
    Checkpoint,
    Contender,
    Suite,
    Work,
    base_suite,
    imported_suites,
    multi30k_suite,
)
from benchmarks.report import command, publish
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.training.config import TransformerConfig

_LEAST_SECONDS = 1.0  # of a turn: the machine's speed varies within a second, so short work is repeated
_PAUSE_SECONDS = 0.3  # the previous contender's threads still spin for a while
_PEERS = ("ctranslate2", "transformers")
_COMPUTE_TYPES = {Precision.FP32: "float32", Precision.INT8: "int8"}  # CTranslate2's names
_EXAMPLES = """--rounds 7
--only 'greedy x 1'
--imported --only opus-mt
--multi30k multi30k/ --run runs/multi30k"""


def main() -> int:
    """Measure, print the table, and print one JSON object as the last line."""
    parser = _parser()
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    if len(cores) < options.cores:
        parser.error(f"--cores is {options.cores}, but this process may use only {len(cores)}")
    torch.set_num_threads(len(cores))
    try:
        suites = _suites(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not suites:
        parser.error(f"--only is {options.only!r}, but no work's name contains it")
    # One batch on all cores, and one batch per core: batches at once, and threads per batch.
    threads = sorted({(1, len(cores)), (1, len(cores)) if options.one_batch else (len(cores), 1)})
    report: dict[str, Any] = {"benchmark": "peers", "hardware": describe_hardware()}
    report |= compare(suites, options.precision, options.rounds, threads)
    print(speed_table(report["results"]), file=sys.stderr)
    publish(report, options.out)
    return 0


def compare(
    suites: Sequence[Suite],
    precisions: Sequence[Precision],
    num_rounds: int,
    threads: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """Run the contenders in alternation on every suite; returns the report.

    Args:
        suites: Models and their works.
        precisions: Precisions of the engine and of CTranslate2.
        num_rounds: Number of timed rounds.
        threads: Settings of the engine and of CTranslate2: batches at once, and threads per batch.
    """
    for package in _PEERS:
        if not _is_installed(package):
            print(f"{package} is not installed, so skipped: pip install -e '.[bench]'", file=sys.stderr)
    print("measuring the machine's memory bandwidth and peak speed", file=sys.stderr)
    machine = measure_machine(max(map(math.prod, threads)))
    equal, results = {}, []
    for suite in suites:
        for work, turns in _take_all_turns(suite, precisions, num_rounds, threads):
            equal[work.name] = {"requests": len(work.sources), "equal": equal_targets(work, turns)}
            for precision in precisions:
                row = summarise(suite, work, precision, turns)
                results.append(row | _floor(suite, work, precision, machine))
        del turns  # its contenders hold their models
    peaks = {precision.value: peak for precision, peak in machine.multiply_adds_per_second.items()}
    return {
        "rounds": num_rounds,
        "bytes_per_second": machine.bytes_per_second,
        "multiply_adds_per_second": peaks,
        "models": {suite.name: _provenance(suite) for suite in suites},
        "equal_targets": equal,
        "results": results,
        "medians": medians(results),
    }


def _take_all_turns(
    suite: Suite, precisions: Sequence[Precision], num_rounds: int, threads: Sequence[tuple[int, int]]
) -> list[tuple[Work, dict[Contender, Turns]]]:
    """Run one turn of every contender to compare their targets, then the timed rounds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ExitStack() as stack,
        Progress(console=Console(stderr=True)) as progress,
    ):
        contenders = list(_contenders(suite, precisions, Path(folder), threads, stack))
        all_turns: list[tuple[Work, dict[Contender, Turns]]] = [(work, {}) for work in suite.works]
        task = progress.add_task(suite.name, total=(num_rounds + 1) * len(suite.works) * len(contenders))
        for round_number in range(num_rounds + 1):
            for work, turns in all_turns:
                for contender in contenders:
                    progress.update(task, description=f"{work.name}: {contender.name}", advance=1)
                    if work.is_long and contender.library == "transformers":
                        continue
                    if round_number == 0:
                        turns[contender] = Turns(contender.translate(work.sources, work.search))
                    else:
                        _take_turn(work, contender, turns[contender])
                if round_number == 0:
                    progress.console.print(f"{work.name}: equal targets of {len(work.sources)}:")
                    progress.console.print(equal_targets(work, turns))
    return all_turns


def _take_turn(work: Work, contender: Contender, turns: Turns) -> None:
    time.sleep(_PAUSE_SECONDS)
    seconds: list[float] = []
    while sum(seconds) < _LEAST_SECONDS:
        started = time.perf_counter()
        contender.translate(work.sources, work.search)
        seconds.append(time.perf_counter() - started)
        if contender.clock is not None:
            turns.step_seconds.append(contender.clock.step_seconds)
            turns.python_shares.append(1 - contender.clock.runner_seconds / seconds[-1])
    turns.seconds.append(statistics.fmean(seconds))


def _contenders(
    suite: Suite,
    precisions: Sequence[Precision],
    folder: Path,
    threads: Sequence[tuple[int, int]],
    stack: ExitStack,
) -> Iterator[Contender]:
    """Yields the installed contenders, ready to translate; the stack stops their processes."""
    model = suite.model
    print(f"{suite.name}: exporting the model, and the same weights for the peers", file=sys.stderr)
    if isinstance(model, Checkpoint):
        _import(model, folder, precisions)
    else:
        export_bundle(model, folder / "bundle", precisions)
    settings = settings_of(load_bundle(folder / "bundle").manifest)
    num_slots = min(max(work.num_rows for work in suite.works), RunnerConfig.max_slots)
    most_rows = max(work.search.beam_size for work in suite.works)  # of a request, in one instance
    for precision, (num_instances, num_threads) in product(precisions, threads):
        engine = EngineProcess(
            folder / "bundle",
            precision,
            num_threads=num_instances * num_threads,
            num_slots=max(num_slots, num_instances * most_rows),
            num_instances=num_instances,
        )
        stack.callback(engine.stop)
        yield Contender("ours", precision, f"{num_instances}x{num_threads}", engine.translate, engine.clock)
    if _is_installed("ctranslate2"):
        from benchmarks.peers.ctranslate2_peer import converted

        load = converted(model, folder, settings)
        theirs = dict.fromkeys(compared("ctranslate2", precision) for precision in precisions)
        for precision, setting in product(theirs, threads):
            peer = load(_COMPUTE_TYPES[precision], *setting)
            yield Contender("ctranslate2", precision, "{}x{}".format(*setting), peer.translate)
    if not all(work.is_long for work in suite.works) and _is_installed("transformers"):
        from benchmarks.peers.transformers_peer import loaded

        yield Contender("transformers", Precision.FP32, "", loaded(model, folder).translate)


def _import(model: Checkpoint, folder: Path, precisions: Sequence[Precision]) -> None:
    """Write a checkpoint and its bundle."""
    from benchmarks.peers.checkpoints import make_checkpoint
    from seq2seq_serve.export.huggingface.exporter import (
        LEAST_EQUAL_TOKENS,
        MAX_MEAN_DIFFERENCE,
        export_checkpoint,
    )
    from seq2seq_serve.training.huggingface.dialect import Limits

    make_checkpoint(model, folder / "checkpoint")
    limits = Limits(model.sizes.max_source_length, model.sizes.max_target_length)
    # With random weights many tokens are as probable, so the proof of int4 says nothing.
    with (
        patch.dict(MAX_MEAN_DIFFERENCE, {Precision.INT4: math.inf}),
        patch.dict(LEAST_EQUAL_TOKENS, {Precision.INT4: 0.0}),
    ):
        export_checkpoint(folder / "checkpoint", folder / "bundle", precisions, limits=limits)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _floor(suite: Suite, work: Work, precision: Precision, machine: Machine) -> dict[str, float]:
    """Returns the floor of a step with all requests; empty if they do not all run in every step."""
    if not work.is_exact or work.search.max_new_tokens is None:
        return {}
    assert isinstance(suite.sizes, TransformerConfig)
    size = step_size(
        suite.sizes,
        len(work.sources),
        work.search.beam_size,
        source_tokens=statistics.mean(map(len, work.sources)),
        target_tokens=work.search.max_new_tokens / 2,
    )
    return {"floor_ms": 1e3 * step_seconds(size, work.num_rows, precision, machine)}


def _provenance(suite: Suite) -> dict[str, Any]:
    sizes = {"sizes": suite.sizes.to_json()}
    if isinstance(suite.model, Checkpoint):
        return {"family": suite.model.family, "weights": "random"} | sizes
    return suite.model.provenance | sizes | {"dev_bleu": suite.model.dev_score}


def _suites(options: argparse.Namespace) -> list[Suite]:
    """Returns the suites with the works that `--only` selects."""
    suites = imported_suites() if options.imported else [base_suite()]
    if options.multi30k and options.run:
        suites.insert(0, multi30k_suite(options.multi30k, options.run))
    chosen = []
    for suite in suites:
        works = tuple(work for work in suite.works if options.only.lower() in work.name.lower())
        if works:
            chosen.append(replace(suite, works=works))
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = command("peers", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--rounds", type=positive, default=5, help="timed turns of every contender (default: 5)")
    add("--cores", type=positive, default=2, help="number of CPUs to use (default: 2)")
    add("--only", default="", help="run only works whose name contains this (default: all)")
    add(
        "--precision",
        type=_precisions,
        default="fp32,int8",
        help="precisions of the engine and of CTranslate2; one alone takes less memory (default: fp32,int8); "
        "int4 is compared with CTranslate2's int8",
    )
    add("--imported", action="store_true", help="compare imported checkpoints instead")
    add("--one-batch", action="store_true", help="only one batch on all cores, which takes less memory")
    add("--multi30k", type=Path, metavar="DIR", help="folder of Multi30k, with its tok/; it is run first")
    add("--run", type=Path, help="a run trained on Multi30k's tok/ folder, English to German")
    return parser


def _precisions(text: str) -> list[Precision]:
    precisions = [Precision(name) for name in text.split(",")]
    if not set(precisions) <= {*_COMPUTE_TYPES, Precision.INT4}:
        raise argparse.ArgumentTypeError(f"{text} has another precision than fp32, int8 and int4")
    return precisions


def _start_again_on(num_cores: int) -> None:
    """Restart this program on `num_cores` CPUs if it may use more.

    OpenMP counts the CPUs when it is loaded, and its threads spin longer if there are more CPUs than threads.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > num_cores:
        os.sched_setaffinity(0, cores[:num_cores])
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.peers", *sys.argv[1:]])


if __name__ == "__main__":
    _start_again_on(_parser().parse_args().cores)
    sys.exit(main())
