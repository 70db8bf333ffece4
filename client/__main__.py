"""Call a server from the command line: `python -m client translate "오늘은 금요일 입니다"`.

Answers go to stdout, one line for each text; errors go to stderr. The exit code is 0 when everything was
answered, 1 when anything failed, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# gRPC's own log repeats in its words what our messages say; read when the first channel is made.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from client.errors import ClientError
from client.output import message_dict, to_json
from client.sync import Client
from client.translate import Translation, read_lines, text_arguments, translate
from client.wire import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_SECONDS
from protos.seq2seq_v1_pb2 import GenerateOptions

_IMAGE, _DATA = ".png", ".json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    # Translations hold every alphabet, whatever the terminal's locale.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")
    try:
        if options.command == "translate":
            plan = _translation(parser, options)
            items = text_arguments(options.texts) if options.texts else read_lines(sys.stdin.fileno())
        with Client(options.address, timeout_seconds=options.timeout_seconds) as client:
            if options.command == "translate":
                return translate(client, items, plan)
            if options.command == "models":
                return _models(client, as_json=options.json)
            return _health(client, options.service)
    except ClientError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except OSError as error:
        return _os_error(error)
    except KeyboardInterrupt:
        return 130


def _os_error(error: OSError) -> int:
    if isinstance(error, BrokenPipeError):
        # Who read our output has left; Python's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        sys.stderr.write(f"error: {error.filename or 'output'}: {error.strerror}\n")
    return 1


def _models(client: Client, *, as_json: bool) -> int:
    for model in client.models():
        line = (
            f"{model.name}: {model.kind}, version {model.version}, {model.precision} on {model.provider}, "
            f"{model.num_slots} slots, {model.vocab_size} tokens in the vocabulary, sources up to "
            f"{model.max_source_length} tokens, targets up to {model.max_target_length}"
        )
        sys.stdout.write((to_json(message_dict(model)) if as_json else line) + "\n")
    return 0


def _health(client: Client, service: str) -> int:
    status = client.health(service)
    sys.stdout.write(status + "\n")
    return 0 if status == "SERVING" else 1


def _translation(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Translation:
    if not options.texts and sys.stdin is None:
        parser.error("no TEXT was given, and standard input is closed")
    attention_file: Path | None = options.attention
    if attention_file is not None:
        if attention_file.suffix not in (_IMAGE, _DATA):
            parser.error(f"--attention {attention_file}: the name must end in {_IMAGE} or {_DATA}")
        if len(options.texts) != 1:
            parser.error(f"--attention shows one text, and {len(options.texts) or 'no'} TEXT was given")
        if options.stream and options.json:
            parser.error("--attention goes with --stream or with --json, not with both")
    try:
        generate_options = GenerateOptions(
            max_new_tokens=options.max_new_tokens,
            attention=attention_file is not None,
            priority=options.priority,
        )
    except ValueError as error:
        parser.error(f"--max-new-tokens or --priority: {error}")
    return Translation(
        model=options.model,
        options=generate_options,
        stream=options.stream,
        as_json=options.json,
        attention_file=attention_file,
    )


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="the server (default %(default)s)"
    )
    common.add_argument(
        "--timeout-seconds",
        type=_seconds,
        default=DEFAULT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="deadline of every call (default %(default)g)",
    )
    parser = argparse.ArgumentParser(
        prog="python -m client",
        description="Call a seq2seq server.",
        epilog='example: python -m client translate "오늘은 금요일 입니다" --attention attention.png',
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser(
        "translate",
        parents=[common],
        help="translate texts, or the lines of standard input",
        description="Translate texts, or the lines of standard input; the output has one line for each.",
        epilog='example: python -m client translate "오늘은 금요일 입니다" --stream',
    ).add_argument
    add("texts", nargs="*", metavar="TEXT", help="what to translate; without any, lines of standard input")
    add("--model", default="", help="the model's name (default: the server's first)")
    add("--stream", action="store_true", help="print pieces as they are decoded")
    add(
        "--json", action="store_true", help="print everything that the server answers, one JSON object a line"
    )
    add(
        "--attention",
        type=Path,
        metavar="FILE",
        help="write the alignment: .png a heatmap, .json the numbers",
    )
    add("--max-new-tokens", type=int, metavar="N", help="the most target tokens (default: the model's limit)")
    add("--priority", type=int, default=0, metavar="N", help="lower is more urgent (default %(default)s)")

    models = commands.add_parser("models", parents=[common], help="list the models that the server serves")
    models.add_argument("--json", action="store_true", help="one JSON object a line")
    health = commands.add_parser(
        "health", parents=[common], help="say whether the server serves; the exit code is 0 only if it does"
    )
    health.add_argument("service", nargs="?", default="", help="a service or a model (default: the server)")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
