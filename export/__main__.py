"""The command `python -m export RUN BUNDLE`, and its forms for checkpoints, adapters and drafts."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

# ONNX Runtime reports every session to its maker unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.commands import Parser, add_version, needs_extra, program

if TYPE_CHECKING:
    from seq2seq_serve.bundle.adapters import AdapterManifest
    from seq2seq_serve.bundle.manifest import Manifest

_BY_SIGNAL = 128  # shells report it plus the signal's number
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LEFT_OUT = 3

_HUGGING_FACE, _ADAPTER, _DRAFT = "huggingface", "adapter", "draft"
_FORMS = (_HUGGING_FACE, _ADAPTER, _DRAFT)
_EXAMPLES = {
    "": f"""example:
  %(prog)s runs/demo bundles/demo --precision fp32,int8

A checkpoint of Hugging Face is exported by `%(prog)s {_HUGGING_FACE} FOLDER BUNDLE`, an adapter of one by
`%(prog)s {_ADAPTER} FOLDER BUNDLE OUT`, and a bundle is cut for drafts by `%(prog)s {_DRAFT} BUNDLE TEXTS
OUT`; see their --help.
""",
    _HUGGING_FACE: """example:
  %(prog)s opus-mt-ko-en bundles/ko-en --precision fp32,int8
  %(prog)s opus-mt-ko-en bundles/ko-en-legal --merge legal-lora
""",
    _ADAPTER: """example:
  python -m export huggingface opus-mt-ko-en bundles/ko-en --adapters
  %(prog)s legal-lora bundles/ko-en adapters/legal --checkpoint opus-mt-ko-en
  python -m server bundles/ko-en --adapter legal=adapters/legal
""",
    _DRAFT: """example:
  %(prog)s bundles/nllb-600m english.txt bundles/nllb-draft
  python -m server bundles/nllb-1.3b --draft bundles/nllb-draft
""",
}
_DESCRIPTIONS = {
    "": "Turn a training run into a bundle that `python -m server` serves.",
    _HUGGING_FACE: "Turn an encoder-decoder checkpoint of Hugging Face into a bundle that `python -m server` "
    "serves.",
    _ADAPTER: """Turn an adapter of low rank (LoRA) of peft into one that a server adds to a bundle.

The bundle was exported with --adapters. Its precisions all take the adapter, and requests for the model
MODEL/NAME have it, in one batch with all others.""",
    _DRAFT: """Cut a bundle in int8 or int4 to the tokens of some texts.

It can then only draft for a larger model (--draft of the server). Where a vocabulary is large, it takes a
fraction of the time. Targets stay those of the larger model.""",
}


def main(arguments: list[str] | None = None) -> int:
    """Export a model and return the exit code.

    0 done, 1 failed, 2 usage, 3 a bundle without the precisions whose proof failed, 130 interrupted by
    Ctrl-C, 143 by SIGTERM.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    form = arguments[0] if arguments and arguments[0] in _FORMS else ""
    options = _parser(form).parse_args(arguments[1:] if form else arguments)
    exports: dict[str, Callable[[argparse.Namespace, list[int]], Manifest | AdapterManifest]] = {
        "": _export,
        _HUGGING_FACE: _export_checkpoint,
        _ADAPTER: _export_adapter,
        _DRAFT: _cut,
    }
    extra = _HUGGING_FACE if form in (_HUGGING_FACE, _ADAPTER) else "export"
    with needs_extra(f"{extra},cpu"), _recorded_interrupts() as interrupts:
        try:
            manifest = exports[form](options, interrupts)
        except BaseException as error:
            if interrupts:  # torch's exporter may turn KeyboardInterrupt into another exception
                print("error: interrupted; nothing was written", file=sys.stderr)
                return _BY_SIGNAL + interrupts[0]
            if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
                print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
            elif isinstance(error, OSError | ValueError):
                print(f"error: {error}", file=sys.stderr)
            else:
                raise
            return 1
    print(options.bundle)
    precisions = getattr(options, "precision", ())
    return _LEFT_OUT if len(getattr(manifest, "variants", precisions)) < len(precisions) else 0


def _parser(form: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"{program('export')} {form}".rstrip(),
        description=_DESCRIPTIONS[form],
        epilog=_EXAMPLES[form],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(parser)
    if form == _DRAFT:
        parser.add_argument("whole", type=Path, metavar="bundle", help="folder of a bundle with int8 or int4")
        parser.add_argument("texts", type=Path, help="file of texts in the language of the targets")
    elif form == _ADAPTER:
        parser.add_argument(
            "adapter", type=Path, metavar="folder", help="folder that peft wrote, or a run of --lora"
        )
        parser.add_argument("whole", type=Path, metavar="bundle", help="bundle exported with --adapters")
    elif form == _HUGGING_FACE:
        parser.add_argument("folder", type=Path, help="folder that save_pretrained wrote")
    else:
        parser.add_argument("run", type=Path, help="folder of a finished `python -m training train`")
    out, what = {_DRAFT: ("out", "bundle"), _ADAPTER: ("out", "adapter")}.get(form, ("bundle", "bundle"))
    parser.add_argument("bundle", type=Path, metavar=out, help="folder to create")
    parser.add_argument("--overwrite", action="store_true", help=f"replace an existing {what}")
    if form == _ADAPTER:
        parser.add_argument(
            "--checkpoint",
            type=Path,
            metavar="FOLDER",
            help="the checkpoint or run that the bundle was exported from (default: as the adapter says)",
        )
        return parser
    if form == _DRAFT:
        parser.add_argument(
            "--most",
            type=_length,
            metavar="TOKENS",
            help="how many tokens to keep, the most frequent ones, beside the end of sequence (default: all "
            "that occur)",
        )
        return parser
    parser.add_argument(
        "--precision",
        type=_precisions,
        default=_precisions("fp32,int8"),
        metavar="LIST",
        help="fp32, int8 and, for large models, int4 (for the CPU), fp16 and bf16 (for CUDA), "
        "comma-separated (default: fp32,int8)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="write nothing if the proof of a precision fails (default: leave it out, and exit with 3, or "
        "with 1 if none is left)",
    )
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="let a server add adapters (LoRA) to the model while it runs; steps take a little longer",
    )
    for name in ("source", "target"):
        parser.add_argument(
            f"--{name}-language",
            default="",
            metavar="TAG",
            help=f"language of the {name}s, such as ko or pt-BR; LibreTranslate's API finds a model by both "
            "(default: what the training or checkpoint names)",
        )
    if form == _HUGGING_FACE:
        parser.add_argument(
            "--merge",
            type=Path,
            metavar="ADAPTER",
            help="folder of an adapter of peft, such as LoRA, to merge into the checkpoint",
        )
        for name in ("source", "target"):
            parser.add_argument(
                f"--max-{name}-length",
                type=_length,
                default=0,
                metavar="TOKENS",
                help=f"the longest {name}{', texts only' * (name == 'source')} "
                "(default: the checkpoint's limit, or its family's)",
            )
    return parser


@contextmanager
def _recorded_interrupts() -> Iterator[list[int]]:
    """Record every Ctrl-C and SIGTERM, because torch sometimes swallows the KeyboardInterrupt they raise."""
    interrupts: list[int] = []
    handlers, hook = {number: signal.getsignal(number) for number in _SIGNALS}, sys.unraisablehook

    def record(signal_number: int, _frame: FrameType | None) -> None:
        interrupts.append(signal_number)
        raise KeyboardInterrupt

    def ignore_interrupts(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            hook(unraisable)

    for number in _SIGNALS:
        signal.signal(number, record)
    sys.unraisablehook = ignore_interrupts
    try:
        yield interrupts
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def _export(options: argparse.Namespace, interrupts: list[int]) -> Manifest:
    from seq2seq_serve.bundle.manifest import is_checkpoint

    if is_checkpoint(options.run):
        raise ValueError(
            f"{options.run} is a checkpoint of Hugging Face, not a training run: "
            f"python -m export {_HUGGING_FACE} {options.run} {options.bundle}"
        )
    with _blocked_interrupts():
        from seq2seq_serve.export.exporter import check_path, export_bundle
        from seq2seq_serve.training.run import load_run

    with _reporting("reading the run", interrupts) as report:
        check_path(options.bundle, overwrite=options.overwrite)
        languages = _languages(options)
        trained = load_run(options.run)
        if trained.published:
            from seq2seq_serve.export.huggingface.exporter import export_tuned

            export: Callable[..., Manifest] = partial(export_tuned, trained, **languages)
        else:
            export = partial(export_bundle, replace(trained, **languages))
        return export(
            options.bundle,
            options.precision,
            overwrite=options.overwrite,
            is_strict=options.strict,
            adapters=options.adapters,
            report=report,
        )


def _export_checkpoint(options: argparse.Namespace, interrupts: list[int]) -> Manifest:
    with _blocked_interrupts():
        from seq2seq_serve.export.exporter import check_path
        from seq2seq_serve.export.huggingface.exporter import export_checkpoint
        from seq2seq_serve.export.huggingface.merging import merged_checkpoint
        from seq2seq_serve.training.huggingface.dialect import Limits

    with ExitStack() as stack:
        report = stack.enter_context(_reporting("reading the checkpoint", interrupts))
        check_path(options.bundle, overwrite=options.overwrite)
        folder = options.folder
        if options.merge is not None:
            folder = stack.enter_context(merged_checkpoint(folder, options.merge))
            report(f"merged {options.merge} into {options.folder}")
        return export_checkpoint(
            folder,
            options.bundle,
            options.precision,
            limits=Limits(options.max_source_length, options.max_target_length),
            **_languages(options),
            overwrite=options.overwrite,
            is_strict=options.strict,
            adapters=options.adapters,
            provenance={} if options.merge is None else {"adapter": options.merge.resolve().name},
            report=report,
        )


def _export_adapter(options: argparse.Namespace, interrupts: list[int]) -> AdapterManifest:
    with _blocked_interrupts():
        from seq2seq_serve.export.huggingface.adapters import export_adapter

    with _reporting("reading the adapter", interrupts) as report:
        return export_adapter(
            options.adapter,
            options.whole,
            options.bundle,
            checkpoint_path=options.checkpoint,
            overwrite=options.overwrite,
            report=report,
        )


def _languages(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the languages that were given, by their names in the manifest; raises ValueError."""
    from seq2seq_serve.training.config import LANGUAGE_TAG

    names = ("source_language", "target_language")
    given = {name: getattr(options, name) for name in names if getattr(options, name)}
    for name, tag in given.items():
        if not LANGUAGE_TAG.fullmatch(tag):
            raise ValueError(f"{name} is {tag!r}, and must be a BCP 47 tag such as ko or pt-BR")
    return given


def _cut(options: argparse.Namespace, interrupts: list[int]) -> Manifest:
    with _blocked_interrupts():
        from seq2seq_serve.export.draft import cut_bundle
        from seq2seq_serve.training.data.text_files import iterate_lines

    with _reporting("reading the bundle", interrupts) as report:
        return cut_bundle(
            options.whole,
            options.bundle,
            iterate_lines(options.texts),
            most=options.most,
            overwrite=options.overwrite,
            report=report,
        )


@contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM while torch is imported.

    That takes seconds, so it is imported after --help, and an interrupted import prints a traceback.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


@contextmanager
def _reporting(first_line: str, interrupts: list[int]) -> Iterator[Callable[[str], None]]:
    """Show the lines of an export's steps on stderr; after the last one, interrupts are ignored."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, markup=False, emoji=False, force_jupyter=False)
    with console.status(first_line) as status:

        def report(line: str) -> None:
            if interrupts:  # torch's exporter has swallowed the KeyboardInterrupt
                raise KeyboardInterrupt
            console.print(line, soft_wrap=True)
            status.update(Text(line))

        yield report
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # too late: the bundle is written


def _length(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens of at least 2")
    return int(text)


def _precisions(text: str) -> tuple[Precision, ...]:
    names = dict.fromkeys(name.strip() for name in text.split(","))
    for name in names:
        if name not in list(Precision):
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(Precision)}")
    return tuple(map(Precision, names))


if __name__ == "__main__":
    sys.exit(main())
