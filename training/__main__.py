"""The command line of training: `python -m training train|distill|score|corpus|attention`."""

from __future__ import annotations

import seq2seq_serve.training.spin  # noqa: F401  # isort: skip

import argparse
import ast
import json
import logging
import math
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from seq2seq_serve.commands import Parser, add_version, needs_extra, program

with needs_extra("training", __name__):
    import torch
    from rich.console import Console

    from seq2seq_serve.bundle.normalization import Normalization
    from seq2seq_serve.training import commands, library
    from seq2seq_serve.training.config import SEEDS, Lora, TrainingPrecision, TransformerConfig
    from seq2seq_serve.training.data.corpus import CorpusFiles
    from seq2seq_serve.training.data.tokenizer import SMALLEST_VOCAB_SIZE
    from seq2seq_serve.training.distill import target_files
    from seq2seq_serve.training.evaluation.comparison import TOKENIZATIONS, MetricSettings
    from seq2seq_serve.training.experiment import arguments_of
    from seq2seq_serve.training.interrupt import TrainingInterrupted
    from seq2seq_serve.training.presets import PRESETS
    from seq2seq_serve.training.ranks import current_rank

_log = logging.getLogger("training")

# The flags that are short for a --set of the same name.
_SETTING_FLAGS = (
    "seed",
    "vocab_size",
    "normalization",
    "source_language",
    "target_language",
    "max_steps",
    "precision",
    "micro_batch_tokens",
    "lora",
)
_MOST_THREADS = 1024
_ALPHA, _MOST_ALPHA = 0.6, 10.0
_BY_SIGNAL = 128  # shells report 128 plus the signal's number

_EXAMPLES = {
    "train": """examples:
  %(prog)s demo --out runs/demo
  %(prog)s small --out runs/mine --source train.ko.gz --target train.en.gz \\
      --dev-source dev.ko --dev-target dev.en
  %(prog)s small --out runs/mine --data train.jsonl \\
      --source-field translation.de --target-field translation.en
  %(prog)s small --out runs/mine --resume
  %(prog)s small --out runs/tuned --from runs/mine --tsv own.tsv --set learning_rate_scale=0.2
  %(prog)s small --out runs/medical --from opus-mt-ko-en --tsv own.tsv --set learning_rate_scale=0.1
  %(prog)s small --out runs/clinic --from whisper-small --tsv clips.tsv --set learning_rate=1.3e-5
  %(prog)s small --out runs/legal --from opus-mt-ko-en --tsv own.tsv --lora rank=16,alpha=32 \\
      --set learning_rate=3e-4
  torchrun --standalone --nproc-per-node gpu --max-restarts 3 \\
      -m training train base --out runs/large --tsv large.tsv.gz --resume
  %(prog)s tiny --out runs/few --tsv few.tsv.gz --set bpe_dropout=0.2 tied=none
  %(prog)s captioner --out runs/photos --tsv photos.tsv --dev-tsv dev.tsv --vocab-size 4000
  %(prog)s memory-network --out runs/stories --tsv stories.tsv
  %(prog)s --config mine.toml""",
    "distill": """example:
  %(prog)s runs/mine tiny --out runs/mine-draft
  python -m export runs/mine-draft bundles/mine-draft
  python -m server bundles/mine --draft bundles/mine-draft""",
    "score": """examples:
  %(prog)s runs/demo --part test
  %(prog)s runs/mine --source test.ko --reference test.en --beam-size 5
  %(prog)s runs/mine --source test.ko --reference a.en b.en --tokenize none""",
    "corpus": """example:
  %(prog)s --out corpora/built-in""",
    "attention": """examples:
  %(prog)s runs/demo "오늘은 금요일 입니다" --json alignment.json --png alignment.png
  %(prog)s runs/demo "오늘은 금요일 입니다" --encoder --layer 2 --png layer-2.png""",
}


class _ConsoleHandler(logging.Handler):
    """Prints log messages above the progress bar; a narrow console does not break their lines."""

    def __init__(self, console: Console, prefix: str) -> None:
        super().__init__()
        self._console = console
        self._prefix = prefix

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        text = self._prefix + level + self.format(record)
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command and flag."""
    root = Parser(
        prog=program("training"),
        description="Train and score models that translate, write captions or answer questions.",
    )
    add_version(root)
    subparsers = root.add_subparsers(dest="command", required=True)

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        command = subparsers.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=_EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(parser=command)
        return command

    _add_train_flags(add("train", "Train a preset on a corpus; without files, on the built-in one."))
    _add_distill_flags(
        add("distill", "Train a small model that drafts tokens for a run's, from the run's own targets.")
    )
    score = add("score", "Score a run on its own dev or test pairs, or on files.")
    score.add_argument("run", type=Path, help="the folder of a run")
    _add_step_flag(score)
    score.add_argument("--part", choices=("dev", "test"), help="part of the run's pairs (default: dev)")
    beams = "number of hypotheses; 1 is greedy (default: %(default)s)"
    score.add_argument("--beam-size", type=_at_least(1), default=1, help=beams)
    alpha = f"exponent of the length penalty, with beams (default: {_ALPHA})"
    score.add_argument("--alpha", type=_alpha, help=alpha)
    _add_device_flag(score)
    _add_metric_flags(score)
    corpus = add("corpus", "Write the built-in corpus as text files.")
    corpus.add_argument("--out", type=Path, required=True, help="the output folder")
    _add_attention_flags(add("attention", "Translate a text and show the attention of each target token."))
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 130 or 143 stopped by Ctrl-C or SIGTERM.

    Wrong usage exits with 2.
    """
    console = Console(stderr=True, force_jupyter=False)  # in a notebook, lines without widgets
    rank = current_rank()
    handler = _ConsoleHandler(console, prefix=f"process {rank}: " if rank else "")
    logging.basicConfig(
        level=logging.WARNING if rank else logging.INFO, format="%(message)s", handlers=[handler]
    )
    logging.getLogger("sacrebleu").setLevel(logging.WARNING)  # its INFO messages are of no use here
    options = _parse(list(sys.argv[1:] if arguments is None else arguments))
    try:
        if options.command == "train":
            _train(options, console)
        elif options.command == "distill":
            _distill(options, console)
        elif options.command == "score":
            _score(options)
        elif options.command == "corpus":
            commands.write_corpus(options.out)
        else:
            _attention(options)
    except OSError as error:
        has_both = error.filename is not None and error.strerror is not None
        _log.error("%s", f"{error.filename}: {error.strerror}" if has_both else error)
        return 1
    except ValueError as error:
        _log.error("%s", error)
        return 1
    except torch.OutOfMemoryError as error:
        _log.error("%s", str(error).partition("\n")[0])
        _log.error("give --micro-batch-tokens N: training then needs less memory, with the same result")
        return 1
    except TrainingInterrupted as interrupt:
        return _BY_SIGNAL + interrupt.signal_number
    except KeyboardInterrupt as interrupt:
        return _BY_SIGNAL + next(iter(interrupt.args), signal.SIGINT)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    """The options of a command line, and of the file that its `--config` names."""
    options = parser().parse_args(arguments)
    if options.command != "train":
        return options
    train: Parser = options.parser
    if options.config is not None:
        try:
            given = arguments_of(options.config, train.switches("--help", "--config", "--set"))
        except ValueError as error:
            train.error(str(error))
        train.place = f"{options.config}: "
        train.parse_args(list(chain(*given.values())))  # its errors name the file
        for name in [*dict(options.set), *["preset"] * (options.preset is not None)]:
            given.pop(name, None)
        options = parser().parse_args([arguments[0], *chain(*given.values()), *arguments[1:]])
    for name in ("preset", "out"):
        if getattr(options, name) is None:
            options.parser.error(f"{name} is missing: name it here, or in a file with --config")
    return options


def _add_train_flags(train: argparse.ArgumentParser) -> None:
    train.add_argument("preset", nargs="?", choices=tuple(PRESETS), help="the model and its recipe")
    train.add_argument("--out", type=Path, help="the run's folder, such as runs/NAME")
    train.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file with the preset, flags such as max_steps = 2000, and names that --set takes; the "
        "command line replaces single values",
    )
    train.add_argument(
        "--source",
        help="file of sources, one per line: sentences, stories with a question, or names of files "
        "(.gz: gzip, here and below)",
    )
    train.add_argument("--target", help="file of their translations, captions or answers, line by line")
    train.add_argument("--tsv", help="instead of both: a file with source, tab, target on each line")
    train.add_argument(
        "--data",
        help="instead of them: records with named fields, as JSON lines (.jsonl), Parquet (.parquet), or the "
        "folder of a Hugging Face dataset",
    )
    train.add_argument("--dev-source", help="held-out sentences (default: some training pairs are held out)")
    train.add_argument("--dev-target", help="their targets")
    train.add_argument("--dev-tsv", help="instead of both: a file with source, tab, target on each line")
    train.add_argument("--dev-data", help="instead of them: records")
    for side in ("source", "target"):
        train.add_argument(
            f"--{side}-field",
            metavar="NAME",
            default=getattr(CorpusFiles, f"{side}_field"),
            help=f"the {side} in --data and --dev-data; a field in a field is written translation.de "
            "(default: %(default)s)",
        )
    train.add_argument(
        "--from",
        dest="parent",
        type=Path,
        metavar="MODEL",
        help="fine-tune: start with the model, weights and tokenizer of this finished run, or of this "
        "Hugging Face folder of a model such as Marian, NLLB, T5, Whisper or TrOCR; also for training hard "
        "attention or a captioner's decoder in two stages",
    )
    train.add_argument(
        "--lora",
        type=_lora,
        metavar="NAME=VALUE,...",
        help="with --from: train a LoRA adapter of that model, which peft loads from OUT/adapter: rank=16, "
        "alpha=32 (default: twice the rank), dropout=0.05 (default: 0), targets=query+value (the default; "
        "names of linear layers, or all-linear)",
    )
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint in --out, or start if there is no run: repeat the same "
        "command until the run is finished",
    )
    train.add_argument("--max-steps", type=_at_least(1), help="the last step (default: the preset's)")
    train.add_argument(
        "--precision",
        choices=get_args(TrainingPrecision),
        help="number format of matrix products (default: bf16 on a GPU with units for it)",
    )
    train.add_argument(
        "--micro-batch-tokens",
        type=_at_least(1),
        help="maximum number of padded tokens that go through the model at once; the gradients of larger "
        "batches are accumulated, with the same result (default: whole batches)",
    )
    train.add_argument(
        "--compile", action="store_true", help="compile the model with torch.compile; needs a C++ compiler"
    )
    train.add_argument(
        "--seed", type=_at_least(0, SEEDS), help="seed of weights, dropout and order (default: the preset's)"
    )
    train.add_argument(
        "--vocab-size",
        type=_at_least(SMALLEST_VOCAB_SIZE),
        help="maximum size of the vocabulary (default: the preset's)",
    )
    train.add_argument(
        "--normalization",
        choices=get_args(Normalization),
        help="how training and serving normalise texts before tokenization: nfc gives the same "
        "text the same code points, and single spaces; nfkc also replaces full-width letters and ligatures "
        "by ordinary letters; none changes nothing (default: nfc; with --from that of MODEL)",
    )
    train.add_argument(
        "--source-language",
        metavar="TAG",
        help="language of the sources, such as ko or pt-BR; a server splits them into sentences by its rules",
    )
    train.add_argument(
        "--target-language",
        metavar="TAG",
        help="language of the targets; LibreTranslate's API selects a model by both languages",
    )
    _add_machine_flags(train)


def _add_distill_flags(distill: argparse.ArgumentParser) -> None:
    distill.add_argument("run", type=Path, help="the folder of a finished run of a Transformer")
    presets = [name for name, preset in PRESETS.items() if isinstance(preset().model, TransformerConfig)]
    distill.add_argument("preset", choices=presets, help="the small model and its recipe")
    distill.add_argument(
        "--out", type=Path, required=True, help="the folder of its run, such as runs/NAME-draft"
    )
    distill.add_argument(
        "--max-sources",
        type=_at_least(1),
        default=100_000,
        help="about how many sources of its corpus the run translates first (default: %(default)s)",
    )
    distill.add_argument("--max-steps", type=_at_least(1), help="the last step (default: the preset's)")
    _add_machine_flags(distill)


def _add_machine_flags(command: argparse.ArgumentParser) -> None:
    add_set_flag(command)
    _add_device_flag(command)
    command.add_argument(
        "--threads",
        type=_at_least(1, _MOST_THREADS + 1),
        help="CPU threads (default: the CPUs that this process may use)",
    )


def _add_device_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device", type=_device, default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )


def _add_step_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--step",
        type=_at_least(1),
        help="use the checkpoint of this step, also during training (default: the final weights)",
    )


def _add_attention_flags(attention: argparse.ArgumentParser) -> None:
    attention.add_argument("run", type=Path, help="the folder of a run")
    _add_step_flag(attention)
    attention.add_argument("text", help="the text to translate")
    attention.add_argument(
        "--encoder", action="store_true", help="show the encoder's self-attention instead, by layer and head"
    )
    attention.add_argument("--layer", type=_at_least(1), help="with --encoder: only this layer, from 1")
    attention.add_argument(
        "--head", type=_at_least(1), help="with --encoder: only this head of each layer, from 1"
    )
    attention.add_argument("--json", type=Path, help="write all weights to this file")
    attention.add_argument("--png", type=Path, help="draw the weights as heatmaps into this file")


def _add_metric_flags(score: argparse.ArgumentParser) -> None:
    files = score.add_argument_group("files", "gzip if a name ends in .gz")
    files.add_argument("--source", type=Path, help="sources, one per line; - is standard input")
    files.add_argument(
        "--reference",
        type=Path,
        nargs="+",
        help="reference texts; several files: several references for each source",
    )
    group = score.add_argument_group("metric")
    group.add_argument(
        "--tokenize",
        choices=TOKENIZATIONS,
        default=MetricSettings.tokenization,
        help="sacreBLEU tokenizer; none for tokenized texts (default: the one for their script)",
    )
    group.add_argument("--lowercase", action="store_true", help="lower-case both sides")
    group.add_argument(
        "--bootstrap",
        type=_at_least(0),
        default=MetricSettings.num_resamples,
        metavar="N",
        help="resampled test sets for the confidence interval, 0 for none "
        f"(default: {MetricSettings.num_resamples})",
    )


@needs_extra("huggingface")  # for Whisper and TrOCR
def _train(options: argparse.Namespace, console: Console) -> None:
    flags = {name: value for name in _SETTING_FLAGS if (value := getattr(options, name)) is not None}
    settings = dict(options.set)
    for name in settings.keys() & flags.keys():
        options.parser.error(f"{name} is given twice: by --{name.replace('_', '-')} and by --set")
    settings |= flags
    try:
        files = CorpusFiles(**{field.name: getattr(options, field.name) for field in fields(CorpusFiles)})
    except ValueError as error:
        options.parser.error(str(error))
    _print_run(
        library.train(
            options.preset,
            options.out,
            **asdict(files),
            parent=options.parent,
            resume=options.resume,
            settings=settings,
            device=options.device,
            threads=options.threads,
            compile=options.compile,
            progress=console,
        )
    )


def _distill(options: argparse.Namespace, console: Console) -> None:
    if options.out.resolve() == options.run.resolve():
        options.parser.error("--out is the folder of the draft model, and not that of the run")
    settings = dict(options.set)
    if options.max_steps is not None:
        settings["max_steps"] = options.max_steps
    request = commands.TrainRequest(
        options.preset,
        options.out,
        target_files(options.out),
        settings,
        teacher=options.run,
        max_sources=options.max_sources,
    )
    _print_run(library.run(request, options.device, options.threads, console))


def _print_run(run: library.Run) -> None:
    if current_rank() == 0:
        print(f"{run.folder}: {run.summary}")
        print(f"{run.summary.steps} steps, {run.summary.seconds:.0f} seconds; weights: {run.summary.weights}")


@needs_extra("huggingface")  # for Whisper and TrOCR
def _score(options: argparse.Namespace) -> None:
    if (options.source is None) != (options.reference is None):
        options.parser.error(
            "--source and --reference go together; without them, the run's own pairs are scored"
        )
    if options.part and options.source:
        options.parser.error("--part chooses from the run's own pairs: leave out either --part or the files")
    if options.alpha is not None and options.beam_size == 1:
        options.parser.error("--alpha needs a --beam-size above 1")
    alpha = _ALPHA if options.alpha is None else options.alpha
    tested = (options.source, options.reference) if options.source else options.part or "dev"
    settings = MetricSettings(options.tokenize, options.lowercase, options.bootstrap)
    commands.score_run(options.run, options.step, tested, options.beam_size, alpha, settings, options.device)


def _attention(options: argparse.Namespace) -> None:
    files = options.json, options.png
    if options.encoder:
        commands.show_self_attention(
            options.run, options.step, options.text, options.layer, options.head, *files
        )
    elif options.layer is not None or options.head is not None:
        options.parser.error(
            "--layer and --head choose from the encoder's self-attention: they go with --encoder"
        )
    else:
        commands.show_alignment(options.run, options.step, options.text, *files)


def add_set_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--set`, which collects pairs of a name and a value."""
    parser.add_argument(
        "--set",
        type=_setting,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="any field of the preset's model and recipe, such as dropout=0.3 bpe_dropout=0.1 norm=pre "
        "(docs/training-settings.md lists them); the last value of a repeated field counts",
    )


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    for read in (json.loads, ast.literal_eval):  # true and null, then .3, True and None
        with suppress(ValueError, SyntaxError):
            return name, read(value)
    return name, value


def _lora(text: str) -> Lora:
    try:
        return Lora(**dict(map(_setting, text.split(","))))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _alpha(text: str) -> float:
    if not -_MOST_ALPHA <= float(text) <= _MOST_ALPHA:  # also of nan
        raise argparse.ArgumentTypeError(f"{text} is not from {-_MOST_ALPHA:g} to {_MOST_ALPHA:g}")
    return float(text)


def _device(name: str) -> torch.device:
    try:
        return library.find_device(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _at_least(minimum: int, below: float = math.inf) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        if int(text) >= below:
            raise argparse.ArgumentTypeError(f"{text} is too much: give less than {below}")
        return int(text)

    return integer


if __name__ == "__main__":
    sys.exit(main())
