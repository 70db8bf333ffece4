"""Compares the engine with CTranslate2 and transformers' `generate`: `python -m benchmarks.peers`.

All contenders have the same weights. Measured: whole requests, encoding included, that arrive all at once,
without gRPC. The works are:

* a `base` Transformer with random weights (V = 32,000, 20 source tokens, exactly 32 target tokens), greedy
  and with beams;
* if a corpus and a run are given, the test set of Multi30k, each sentence to its last token, with the
  sacreBLEU of every contender.

With `--imported` they are checkpoints of Hugging Face with random weights, in the sizes of published ones and
with their settings of `generate`: greedy for 1 and 8 requests, and beams for 8. (`benchmarks.speech` has
Whisper.)

Precisions are fp32, int8 and int4, which is compared with CTranslate2's int8; transformers has fp32 only.
The engine runs with two settings (instances x threads per instance), and so does CTranslate2 (inter_threads x
intra_threads). The faster setting of each counts.

First the tokens are compared: our fp32 with the fp32 of each peer, and others with the fp32 of the same
library. Then all contenders alternate within each round, and medians over the rounds are compared; work that
takes less than a second is repeated in its turn. The machine's speed varies over time, so only ratios within
one run are meaningful.

Each setting of the engine has a process of its own, in place of the server's. As there, several instances are
processes beside it, and one is a thread.
The time to send sources and targets between processes counts as the engine's.

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
from benchmarks.floors import Machine, measure_machine, step_floor
from benchmarks.hardware import describe_hardware
from benchmarks.load.engine import settings_of
from benchmarks.peers.our_engine import EngineProcess
from benchmarks.peers.report import (
    Turns,
    agreement_table,
    compared,
    equal_targets,
    medians,
    medians_table,
    speed_table,
    summarise,
)
from benchmarks.peers.transformers_peer import TransformersPeer
from benchmarks.peers.work import (
    Checkpoint,
    Contender,
    Suite,
    Work,
    base_suite,
    imported_suites,
    multi30k_suite,
    sentences_suite,
)
from benchmarks.report import command, publish
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.export.huggingface.exporter import (
    LEAST_EQUAL_TOKENS,
    MAX_MEAN_DIFFERENCE,
    export_checkpoint,
)
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.training.config import TransformerConfig
from seq2seq_serve.training.huggingface.dialect import Limits
from seq2seq_serve.training.run import TrainedModel

_LEAST_SECONDS = 1.0  # of a turn: the machine's speed varies within a second, so short work is repeated
_PAUSE_SECONDS = 0.3  # the previous contender's threads still spin for a while
_WIDTH = 160  # columns of the tables in a file
_COMPUTE_TYPES = {Precision.FP32: "float32", Precision.INT8: "int8"}  # CTranslate2's names
_EXAMPLES = """--rounds 7
--only 'greedy x 1'
--imported --only opus-mt
--multi30k multi30k/ --run runs/multi30k"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and print one JSON object as the last line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    if len(cores) < options.cores:
        parser.error(f"--cores is {options.cores}, but this process may use only {len(cores)}")
    console = Console(stderr=True, width=None if sys.stderr.isatty() else _WIDTH)
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    try:
        suites = _suites(options, console)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not suites:
        parser.error(f"--only is {options.only!r}, but no work's name contains it")
    report: dict[str, Any] = {"benchmark": "peers", "hardware": describe_hardware()}
    report |= compare(suites, options.precision, options.rounds, len(cores), console)
    console.print(speed_table(report))
    if options.imported:
        report["medians"] = medians(report["results"])
        console.print(medians_table(report["medians"]))
    publish(report, options.out)
    return 0


def compare(
    suites: Sequence[Suite],
    precisions: Sequence[Precision],
    num_rounds: int,
    num_cores: int,
    console: Console,
) -> dict[str, Any]:
    """Run the contenders in alternation on every suite; returns the report.

    Args:
        suites: Models and their works.
        precisions: Precisions of the engine and of CTranslate2.
        num_rounds: Number of timed rounds.
        num_cores: Most threads of a contender.
        console: Shows progress, and the peers that are skipped because they are not installed.
    """
    console.print("measuring the machine's memory bandwidth and peak speed")
    machine = measure_machine(num_cores)
    agreement, results = [], []
    for suite in suites:
        for work, turns in _take_all_turns(suite, precisions, num_rounds, num_cores, console):
            agreement.append(equal_targets(work, turns))
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
        "equal_targets": agreement,
        "results": results,
    }


def _take_all_turns(
    suite: Suite, precisions: Sequence[Precision], num_rounds: int, num_cores: int, console: Console
) -> list[tuple[Work, dict[Contender, Turns]]]:
    """Run one turn of every contender to compare their targets, then the timed rounds."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, Progress(console=console) as progress:
        contenders = list(_contenders(suite, precisions, Path(folder), num_cores, console, stack))
        all_turns: list[tuple[Work, dict[Contender, Turns]]] = [(work, {}) for work in suite.works]
        task = progress.add_task(suite.name, total=(num_rounds + 1) * len(suite.works) * len(contenders))
        for round_number in range(num_rounds + 1):
            for work, turns in all_turns:
                for contender in contenders:
                    progress.update(task, description=f"{work.name}: {contender.name}")
                    if round_number == 0:
                        turns[contender] = Turns(contender.translate(work.sources, work.search))
                    else:
                        _take_turn(work, contender, turns[contender])
                    progress.advance(task)
            if round_number == 0:
                shown = [equal_targets(work, turns) for work, turns in all_turns]
                console.print(agreement_table(shown))
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
    num_cores: int,
    console: Console,
    stack: ExitStack,
) -> Iterator[Contender]:
    """Yields the installed contenders, ready to translate; the stack stops their processes."""
    model = suite.model
    console.print(f"{suite.name}: exporting the model, and the same weights for the peers")
    if isinstance(model, Checkpoint):
        from benchmarks.peers.checkpoints import make_checkpoint

        make_checkpoint(model, folder / "checkpoint")
        limits = Limits(model.sizes.max_source_length, model.sizes.max_target_length)
        # With random weights many tokens are as probable, so the proof of int4 says nothing.
        with (
            patch.dict(MAX_MEAN_DIFFERENCE, {Precision.INT4: math.inf}),
            patch.dict(LEAST_EQUAL_TOKENS, {Precision.INT4: 0.0}),
        ):
            export_checkpoint(folder / "checkpoint", folder / "bundle", precisions, limits=limits)
    else:
        export_bundle(model, folder / "bundle", precisions)
    settings = settings_of(load_bundle(folder / "bundle").manifest)
    num_slots = min(max(work.num_rows for work in suite.works), RunnerConfig.max_slots)
    # One batch on all cores, and one batch per core: batches at once, and threads per batch.
    threads = [(1, num_cores)] if suite.one_batch else sorted({(1, num_cores), (num_cores, 1)})
    for precision, setting in product(precisions, threads):
        engine = EngineProcess(folder / "bundle", precision, num_cores, num_slots, num_instances=setting[0])
        stack.callback(engine.stop)
        yield Contender("ours", precision, "{}x{}".format(*setting), engine.translate, engine.clock)
    if _is_installed("ctranslate2", console):
        from benchmarks.peers.ctranslate2_peer import converted

        load = converted(model, folder, settings)
        theirs = dict.fromkeys(compared("ctranslate2", precision) for precision in precisions)
        for precision, setting in product(theirs, threads):
            peer = load(_COMPUTE_TYPES[precision], *setting)
            yield Contender("ctranslate2", precision, "{}x{}".format(*setting), peer.translate)
    if not any(work.is_long for work in suite.works) and _is_installed("transformers", console):
        generate = _generate(model, folder)
        yield Contender("transformers", Precision.FP32, "", generate.translate)


def _generate(model: TrainedModel | Checkpoint, folder: Path) -> TransformersPeer:
    """Returns `generate` of the checkpoint, or of a converted model of this project."""
    import transformers

    if isinstance(model, Checkpoint):
        loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "checkpoint")
        return TransformersPeer(loaded.eval())
    from benchmarks.peers.marian import as_marian

    return TransformersPeer(as_marian(model.model, torch.device("cpu"), torch.float32))


def _is_installed(package: str, console: Console) -> bool:
    is_installed = importlib.util.find_spec(package) is not None
    if not is_installed:
        console.print(f"{package} is not installed, so skipped: pip install -e '.[bench]'", markup=False)
    return is_installed


def _floor(suite: Suite, work: Work, precision: Precision, machine: Machine) -> dict[str, float]:
    """Returns the floor of a step with all requests; empty if they do not all run in every step."""
    if not work.is_exact or work.search.max_new_tokens is None:
        return {}
    assert isinstance(suite.sizes, TransformerConfig)
    floor = step_floor(
        suite.sizes,
        precision,
        num_requests=len(work.sources),
        beam_size=work.search.beam_size,
        source_tokens=statistics.mean(map(len, work.sources)),
        target_tokens=work.search.max_new_tokens / 2,
        machine=machine,
    )
    return {
        "floor_ms": 1e3 * floor.seconds,
        "floor_read_ms": 1e3 * floor.read_seconds,
        "floor_multiply_ms": 1e3 * floor.multiply_seconds,
    }


def _provenance(suite: Suite) -> dict[str, Any]:
    sizes = {"sizes": suite.sizes.to_json()}
    if isinstance(suite.model, Checkpoint):
        return {"family": suite.model.family, "weights": "random"} | sizes
    known = suite.model.provenance
    kept = {key: known[key] for key in ("preset", "commit", "steps", "weights") if key in known}
    return kept | sizes | {"dev_bleu": suite.model.dev_score}


def _suites(options: argparse.Namespace, console: Console) -> list[Suite]:
    """Returns the suites with the works that `--only` selects."""
    suites = imported_suites() if options.imported else [base_suite(), sentences_suite()]
    if options.multi30k and options.run:
        suites.insert(0, multi30k_suite(options.multi30k, options.run))
    elif not options.imported:
        console.print("Multi30k is skipped: it needs --multi30k DIR and --run RUN")
    chosen = []
    for suite in suites:
        works = tuple(work for work in suite.works if options.only.lower() in work.name.lower())
        if works:
            chosen.append(replace(suite, works=works, one_batch=options.one_batch))
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
