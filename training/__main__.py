"""The command line of training: `python -m training train|score|corpus|attention`."""

from __future__ import annotations

import training.spin  # noqa: F401  # isort: skip

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from training import commands
from training.corpus import CorpusFiles
from training.loop import TrainingInterrupted
from training.presets import PRESETS
from training.tokenizer import SMALLEST_VOCAB_SIZE

_log = logging.getLogger("training")

_BY_SIGNAL = 128  # plus the signal's number, as shells count

_EXAMPLES = {
    "train": """examples:
  python -m training train demo --out runs/demo
  python -m training train small --out runs/mine --source train.ko.gz --target train.en.gz \\
      --dev-source dev.ko --dev-target dev.en
  python -m training train small --out runs/mine --resume
  python -m training train tiny --out runs/few --tsv few.tsv.gz --set bpe_dropout=0.2 tied=none""",
    "score": """examples:
  python -m training score runs/demo --part test
  python -m training score --hypothesis translations.txt --reference test.en""",
    "corpus": """example:
  python -m training corpus --out corpora/built-in""",
    "attention": """example:
  python -m training attention runs/demo "오늘은 금요일입니다" --json attention.json""",
}


class _ConsoleHandler(logging.Handler):
    """Prints above the progress bar, each message unbroken however narrow the console is."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        text = level + self.format(record)
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


def parser() -> argparse.ArgumentParser:
    """Every command and flag."""
    root = argparse.ArgumentParser(
        prog="python -m training", description="Train and score translation models."
    )
    subparsers = root.add_subparsers(dest="command", required=True)

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return subparsers.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=_EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    _add_train_flags(add("train", "Train a preset on a corpus; without files, on the built-in one."))
    score = add("score", "Score a run on its own dev or test pairs, or one file against another.")
    score.add_argument("run", type=Path, nargs="?", help="the folder of a finished run")
    score.add_argument("--part", choices=("dev", "test"), default="dev", help="which pairs (default: dev)")
    score.add_argument("--beam-size", type=_at_least(1), default=1, help="1 is greedy search (default: 1)")
    score.add_argument(
        "--alpha", type=float, default=0.6, help="of the length penalty of beams (default: 0.6)"
    )
    score.add_argument("--hypothesis", type=Path, help="translations, one a line")
    score.add_argument("--reference", type=Path, help="what they are compared with")
    corpus = add("corpus", "Write the built-in corpus as text files.")
    corpus.add_argument("--out", type=Path, required=True, help="the folder to write to")
    attention = add("attention", "Translate a text and show what each piece of it attended to.")
    attention.add_argument("run", type=Path, help="the folder of a finished run")
    attention.add_argument("text", help="what to translate")
    attention.add_argument("--json", type=Path, help="a file to write all weights to")
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit code: 0 done, 1 failed, 130 or 143 stopped by Ctrl-C or SIGTERM.

    A wrong usage exits with 2.
    """
    console = Console(stderr=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_ConsoleHandler(console)])
    root = parser()
    options = root.parse_args(arguments)
    try:
        if options.command == "train":
            _train(root, options, console)
        elif options.command == "score":
            _score(root, options)
        elif options.command == "corpus":
            commands.write_corpus(options.out)
        else:
            commands.show_attention(options.run, options.text, options.json)
    except OSError as error:
        has_both = error.filename is not None and error.strerror is not None
        _log.error("%s", f"{error.filename}: {error.strerror}" if has_both else error)
        return 1
    except ValueError as error:
        _log.error("%s", error)
        return 1
    except TrainingInterrupted as interrupt:
        return _BY_SIGNAL + interrupt.signal_number
    except KeyboardInterrupt:
        return _BY_SIGNAL + signal.SIGINT
    return 0


def _add_train_flags(train: argparse.ArgumentParser) -> None:
    train.add_argument("preset", choices=tuple(PRESETS), help="model and recipe")
    train.add_argument("--out", type=Path, required=True, help="the run's folder, such as runs/NAME")
    train.add_argument("--source", help="source sentences, one a line (.gz: gzip, here and below)")
    train.add_argument("--target", help="their translations, line by line")
    train.add_argument("--tsv", help="instead: source, tab, target on each line")
    train.add_argument("--dev-source", help="held-out sentences (default: some training pairs are held out)")
    train.add_argument("--dev-target", help="their translations")
    train.add_argument("--dev-tsv", help="instead: source, tab, target on each line")
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    train.add_argument("--max-steps", type=_at_least(1), help="where to stop (default: the preset's)")
    train.add_argument(
        "--seed", type=_at_least(0), help="of weights, dropout and order (default: the preset's)"
    )
    train.add_argument(
        "--vocab-size",
        type=_at_least(SMALLEST_VOCAB_SIZE),
        help="most tokens of the vocabulary (default: the preset's)",
    )
    train.add_argument(
        "--set",
        type=_setting,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="any field of the preset's model and recipe, such as dropout=0.3 bpe_dropout=0.1 norm=pre "
        "(docs/training.md lists them)",
    )
    train.add_argument(
        "--device", type=_device, default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    train.add_argument("--threads", type=_at_least(1), help="CPU threads (default: the CPUs it may use)")


def _train(root: argparse.ArgumentParser, options: argparse.Namespace, console: Console) -> None:
    flags = {"seed": options.seed, "vocab_size": options.vocab_size}
    settings = dict(options.set) | {name: value for name, value in flags.items() if value is not None}
    if options.resume and settings:
        root.error(
            "--seed, --vocab-size and --set are those that the run was started with: "
            "leave them out with --resume"
        )
    # More threads than CPUs, as torch would take in a process tied to a few, are many times slower.
    can_tell = hasattr(os, "sched_getaffinity")  # Linux only
    num_cpus = len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1
    torch.set_num_threads(options.threads or num_cpus)
    try:
        files = CorpusFiles(
            options.source,
            options.target,
            options.tsv,
            options.dev_source,
            options.dev_target,
            options.dev_tsv,
        )
    except ValueError as error:
        root.error(str(error))
    commands.train(
        options.preset,
        options.out,
        files,
        is_resumed=options.resume,
        max_steps=options.max_steps,
        settings=settings,
        device=options.device,
        console=console,
    )


def _score(root: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    is_files = options.hypothesis is not None and options.reference is not None
    if (options.run is None) != is_files:
        root.error("score needs either a run, or both --hypothesis and --reference")
    if is_files:
        commands.score_files(options.hypothesis, options.reference)
    else:
        commands.score_run(options.run, options.part, options.beam_size, options.alpha)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unknown = argparse.ArgumentTypeError(f"{name!r} is unknown: give auto, cpu, cuda or cuda:N")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise unknown from error
    if device.type not in ("cpu", "cuda"):
        raise unknown
    num_devices = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_devices:
        raise argparse.ArgumentTypeError(f"{name} is asked for, and torch sees {num_devices} CUDA devices")
    return device


def _at_least(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        return int(text)

    return integer


if __name__ == "__main__":
    sys.exit(main())
