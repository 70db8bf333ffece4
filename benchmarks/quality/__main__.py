"""Scores a translation run on test sets, through the server: `python -m benchmarks.quality RUN --test ...`.

Chooses averaging and length penalty on dev, exports fp32 and int8, starts the real server, translates the
test sets through the gRPC client with beams of 5, and scores them with sacreBLEU. Every candidate on dev is
scored in the same way. The test sets are translated once, after every choice is made. Speed is not measured.
`RUN/bundle` and `RUN/NAME.PRECISION.txt` keep what was served and translated. `multi30k.sh` beside this
file trains the runs. The table goes to standard output; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.quality import lost_speech, published, short_windows
from benchmarks.quality.recipe import PRECISIONS, ask, describe_run, export, report_scores
from benchmarks.report import command, markdown
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.client import GenerateOptions
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.training.checkpoint import checkpoint_step, list_checkpoints, load_checkpoint
from seq2seq_serve.training.data.text_files import read_parallel, write_lines
from seq2seq_serve.training.evaluation.comparison import MetricSettings, compare
from seq2seq_serve.training.run import RunFolder, load_checkpoints

_TASKS = {"published": published.main, "lost-speech": lost_speech.main, "short-windows": short_windows.main}
BEAM_SIZE = 5
NUM_AVERAGED = 1, 5, 10
# Exponents of the length penalty of Wu et al. 2016, ((5 + |Y|) / 6)^alpha: 0 is none, a large one prefers
# long targets.
ALPHAS = 0.0, 1.0, 2.0, 3.0, 4.0


@dataclass(frozen=True)
class Choice:
    """A candidate and its BLEU on dev.

    Attributes:
        steps: Training steps of the averaged checkpoints.
        alpha: Exponent of the length penalty.
    """

    steps: tuple[int, ...]
    alpha: float
    bleu: float

    @property
    def search(self) -> GenerateOptions:
        """The search options of the candidate's translations."""
        return GenerateOptions(beam_size=BEAM_SIZE, length_penalty=self.alpha)


def main(arguments: Sequence[str] | None = None) -> int:
    """Choose, serve and score; returns 0 if done, 1 if it failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _TASKS:
        return _TASKS[arguments[0]](arguments)
    options = _parser().parse_args(arguments)
    metric = MetricSettings(tokenization="none" if options.tokens else None)
    return report_scores(
        options.task or options.run.name,
        lambda console: measure(options.run, options.test, metric, console),
        table,
        options.out,
    )


def measure(
    run: Path,
    test_sets: Sequence[tuple[str, str, str]],
    metric: MetricSettings,
    console: Console,
) -> dict[str, Any]:
    """Choose, export, serve and score; returns the report.

    Args:
        run: Folder of a finished run.
        test_sets: Name, file of sources, and file of references of each.
        metric: Settings of the scores; the same metric chooses on dev.
        console: Shows progress.
    """
    pairs = {
        name: read_parallel(Path(source), Path(reference)) for name, source, reference in test_sets
    }  # before the long work
    candidates = choose(run, metric, console)
    best = max(candidates, key=lambda candidate: candidate.bleu)
    bundle = export(load_checkpoints(run, best.steps), run, console)
    texts: dict[tuple[str, Precision], list[str]] = {}
    for precision in PRECISIONS:
        questions = [([pair.source for pair in its], best.search) for its in pairs.values()]
        for name, answers in zip(pairs, ask(bundle, precision, questions, console), strict=True):
            texts[name, precision] = [answer.text for answer in answers]
            write_lines(run / f"{name}.{precision}.txt", texts[name, precision])
    test = {}
    for name, its in pairs.items():
        systems = [texts[name, precision] for precision in PRECISIONS]
        scores = compare(systems, [[pair.target for pair in its]], metric)
        by_precision = {
            precision: {score.metric: dataclasses.asdict(score) for score in row}
            for precision, row in zip(PRECISIONS, scores, strict=True)
        }
        test[name] = {"sentences": len(its), "scores": by_precision}
    return {
        "run": describe_run(run),
        "search": {"beam_size": BEAM_SIZE, "alpha": best.alpha, "steps": best.steps},
        "dev": [dataclasses.asdict(candidate) for candidate in candidates],
        "test": test,
    }


def choose(run: Path, metric: MetricSettings, console: Console) -> list[Choice]:
    """Returns every candidate with its BLEU on the run's dev pairs, through the server in fp32."""
    dev = RunFolder(run).read_pairs("dev")
    sources, references = [pair.source for pair in dev], [pair.target for pair in dev]
    settings = dataclasses.replace(metric, num_resamples=0)
    found = []
    for steps in step_choices(run):
        candidates = [Choice(steps, alpha, 0.0) for alpha in ALPHAS]
        with tempfile.TemporaryDirectory() as folder:
            export_bundle(load_checkpoints(run, steps), Path(folder) / "bundle", [Precision.FP32])
            questions = [(sources, candidate.search) for candidate in candidates]
            answers = ask(Path(folder) / "bundle", Precision.FP32, questions, console)
            for candidate, results in zip(candidates, answers, strict=True):
                texts = [result.text for result in results]
                bleu = compare([texts], [references], settings)[0][0].score
                found.append(dataclasses.replace(candidate, bleu=bleu))
                console.log(f"dev: {found[-1]}", highlight=False)
    return found


def step_choices(run: Path) -> list[tuple[int, ...]]:
    """Returns the candidates' steps: the checkpoint with training's best dev score, and the newest ones."""
    paths = list_checkpoints(RunFolder(run).checkpoints)
    steps = [checkpoint_step(path) for path in paths]
    best = load_checkpoint(paths[-1]).best
    newest = [tuple(steps[-number:]) for number in NUM_AVERAGED]
    return list(dict.fromkeys([(best.step,), *newest] if best else newest))


def table(report: dict[str, Any]) -> str:
    """Returns the scores as a Markdown table."""
    rows = []
    for name, result in report["test"].items():
        for metric in result["scores"][Precision.FP32]:
            scores = [result["scores"][precision][metric] for precision in PRECISIONS]
            cells = (f"{score['score']:.2f} ± {score['half_interval']:.2f}" for score in scores)
            rows.append((name, metric, *cells))
    return (
        f"{report['task']}: {report['run']['parameters']:,} parameters, {report['run']['steps']:,} steps, "
        f"{len(report['search']['steps'])} checkpoints averaged, beam {report['search']['beam_size']}, "
        f"alpha {report['search']['alpha']}\n\n"
    ) + markdown(("test set", "metric", *PRECISIONS), rows, num_left=2)


def _parser() -> argparse.ArgumentParser:
    parser = command(
        "quality",
        __doc__,
        "runs/mine --test test2016 test.en test.de\npublished --models models/\n"
        "lost-speech --bundle bundles/base\nshort-windows --models whisper-base",
    )
    add = parser.add_argument
    add(
        "run",
        type=Path,
        help="folder of a finished run; or `published`, `lost-speech`, `short-windows`: they have a --help",
    )
    add(
        "--test",
        nargs=3,
        action="append",
        required=True,
        metavar=("NAME", "SOURCES", "REFERENCES"),
        help="a test set: its name and its files, one text a line; repeat the flag for each",
    )
    add("--tokens", action="store_true", help="the files hold tokens, which BLEU counts as they are")
    add("--task", help="name of the corpus in the report (default: the run's name)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
