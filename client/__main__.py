"""Call a server from the command line: `python -m client translate "오늘은 금요일 입니다"`.

Answers go to stdout, errors and warnings to stderr. The exit code is 0 when everything was answered, 1 when
anything failed, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

# gRPC's own log would repeat our error messages in other words. It reads this when the first channel is made.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from client.errors import ClientError
from client.files import COMPRESSED, STANDARD, WrongOutput
from client.many import DEFAULT_GIVE_UP_SECONDS, DEFAULT_IN_FLIGHT
from client.output import message_dict, one_line, to_json
from client.sync import Client
from client.translate import Translation, translate
from client.wire import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_SECONDS, Tls
from protos.seq2seq_v1_pb2 import (
    LONG_SOURCE_SPLIT,
    LONG_SOURCE_SPLIT_ALWAYS,
    GenerateOptions,
    LongSource,
    Model,
    Target,
    Version,
    VersionState,
)

_IMAGE, _DATA = ".png", ".json"
_TEXT_SECONDS = 10.0  # to wait for a server where texts were typed: enough to connect anew
_SPLITTING = (LONG_SOURCE_SPLIT, LONG_SOURCE_SPLIT_ALWAYS)


def _texts(text: str) -> list[str]:
    return text.split("\n")


def _prefix(text: str) -> Target:
    return Target(text=text)


def _ids(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not token ids with commas, such as 5,17") from error


def _biases(text: str) -> dict[int, float]:
    try:
        pairs = [pair.split("=") for pair in text.split(",")]
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 5=-1.5,17=2") from error


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def _long_source(text: str) -> int:
    if text not in ("refuse", "truncate", "split", "split_always"):
        raise argparse.ArgumentTypeError(f"{text!r} is not refuse, truncate, split or split_always")
    return LongSource.Value(f"LONG_SOURCE_{text.upper()}")


# For each field of GenerateOptions: its type, the name of its value, its help.
_OPTIONS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "max_new_tokens": (int, "N", "the most target tokens (default: the limit of --max-length-ratio)"),
    "max_length_ratio": (
        float,
        "X",
        "limit a target to X times its source's tokens, plus a constant of the model; 0: only to the model's "
        "longest target (default: the model's own ratio; with --max-new-tokens: 0)",
    ),
    "priority": (int, "N", "-10 to 10, lower is more urgent; below 0 needs the role admin (default: 0)"),
    "min_new_tokens": (int, "N", "the fewest target tokens (default: 0)"),
    "repetition_penalty": (float, "X", "above 1: makes tokens less likely to come again (default: 1)"),
    "no_repeat_ngram_size": (int, "N", "never repeat a sequence of N tokens (default: off)"),
    "suppressed_token_ids": (_ids, "ID,ID", "never select these tokens"),
    "logit_bias": (_biases, "ID=X,ID=X", "add X to the logit of token ID"),
    "stop_sequences": (_texts, "TEXT", "end the target before TEXT; several: a line each"),
    "target_prefix": (_prefix, "TEXT", "start the target with TEXT"),
    "beam_size": (int, "N", "search with N hypotheses at once (default: take the most probable token)"),
    "length_penalty": (float, "X", "with --beam-size: alpha of Wu et al. 2016; 0: no penalty (default: 0.6)"),
    "early_stopping": (_truth, "BOOL", "with --beam-size N: stop at N complete hypotheses (default: true)"),
    "num_hypotheses": (int, "N", "print N hypotheses for each text, one a line (default: 1)"),
    "temperature": (float, "X", "draw tokens; the next four flags need it (default: take the best)"),
    "top_k": (int, "N", "draw from the N best tokens (default: all)"),
    "top_p": (float, "X", "draw from the fewest best tokens whose probabilities add up to X (default: 1)"),
    "min_p": (float, "X", "draw from tokens at least X times as probable as the best (default: 0)"),
    "seed": (int, "N", "draw the same tokens each time (default: the server chooses a seed)"),
    "log_probabilities": (bool, "", "print the log-probability of every token (needs --json)"),
    "num_alternatives": (int, "N", "print the N best tokens at every position (needs --json)"),
    "word_alignment": (bool, "", "print which source and target words belong together (needs --json)"),
    "long_source": (
        _long_source,
        "WHAT",
        "refuse: a text that is too long for the model is an error; truncate: leave out its end; split: "
        "translate each of its lines by itself, and lines that are too long sentence by sentence; "
        "split_always: translate every sentence by itself, also those of a short text (default: refuse)",
    ),
    "source_language": (str, "TAG", "language by whose rules sentences are split (default: the model's)"),
}

_ONLY_IN_JSON = ("log_probabilities", "num_alternatives", "word_alignment")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # Translations hold every alphabet, whatever the terminal's locale.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")
    try:
        if options.command == "translate":
            plan = _translation(options)
        elif options.command == "health" and options.metrics_url:
            return _readiness(options.metrics_url, options.timeout_seconds)
        token = _token(options.token_file) if options.token_file else ""
        with Client(
            options.address, timeout_seconds=options.timeout_seconds, tls=_tls(options), token=token
        ) as client:
            if options.command == "translate":
                return translate(client, plan)
            if options.command == "score":
                return _score(client, options)
            return _about_the_server(client, options)
    except BrokenPipeError:
        # The reader of our output has left; Python's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _report(error, f"error: {error.filename or 'output'}: {error.strerror}")
    except ClientError as error:
        return _report(error, f"error: {error}")
    except WrongOutput as error:
        return _report(error, f"error: --resume {options.output}: {error}")
    except KeyboardInterrupt as error:
        _report(error)
        return 130


def _token(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        text = f"{path} is not a file with a token: it has other bytes"
        raise ClientError("UNAUTHENTICATED", text) from error


def _tls(options: argparse.Namespace) -> Tls | None:
    files = Tls(options.tls_ca, options.tls_certificate, options.tls_key)
    if (files.certificate is None) != (files.key is None):
        options.parser.error("--tls-certificate and --tls-key go together")
    return files if options.tls or files != Tls() else None


def _report(error: BaseException, *lines: str) -> int:
    sys.stderr.writelines(f"{line}\n" for line in (*lines, *getattr(error, "__notes__", ())))
    return 1


def _score(client: Client, options: argparse.Namespace) -> int:
    try:
        answer = client.score(options.source, options.target, model=options.model)
    except ValueError:
        sys.stderr.write("error: SOURCE or TARGET is not valid UTF-8\n")
        return 1
    if options.json:
        sys.stdout.write(to_json(message_dict(answer)) + "\n")
        return 0
    for token, log_probability in zip(answer.target_tokens, answer.log_probabilities, strict=True):
        sys.stdout.write(f"{log_probability:9.4f}  {one_line(token)}\n")
    sys.stdout.write(f"{answer.score:9.4f}\n")
    return 0


def _about_the_server(client: Client, options: argparse.Namespace) -> int:
    if options.command == "health":
        status = client.health(options.service)
        sys.stdout.write(status + "\n")
        return 0 if status == "SERVING" else 1
    if options.command == "unload":
        client.unload(options.model)
    elif options.command == "versions":
        for version in client.versions(options.model):
            _print(version, _version_line(version), as_json=options.json)
    else:
        is_load = options.command == "load"
        for model in [client.load(options.model, options.version)] if is_load else client.models():
            _print(model, _model_line(model), as_json=options.json)
    return 0


def _readiness(url: str, timeout_seconds: float) -> int:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=timeout_seconds):
            sys.stdout.write("SERVING\n")
            return 0
    except urllib.error.HTTPError as error:
        with error:
            sys.stdout.write(f"NOT_SERVING: {error.read().decode().strip()}\n")
    except (OSError, ValueError, HTTPException) as error:
        hint = "" if "://" in url else f"; write http://{url}"
        sys.stderr.write(f"error: no server answers at {url} ({error}){hint}\n")
    return 1


def _print(message: Message, line: str, *, as_json: bool) -> None:
    sys.stdout.write((to_json(message_dict(message)) if as_json else line) + "\n")


def _model_line(model: Model) -> str:
    return (
        f"{model.name}: {model.kind}, version {model.version}, {model.precision} on {model.provider}, "
        f"{model.num_slots} slots, {model.vocab_size} tokens in the vocabulary, sources up to "
        f"{model.max_source_length} tokens, targets up to {model.max_target_length}"
    )


def _version_line(version: Version) -> str:
    state = VersionState.Name(version.state).removeprefix("VERSION_STATE_").lower()
    reason = f": {one_line(version.reason)}" if version.reason else ""
    return f"{version.model}, version {version.version}: {state}{reason}"


def _check_files(options: argparse.Namespace) -> None:
    parser, input_, output = options.parser, options.input, options.output
    if options.texts and input_ != STANDARD:
        parser.error("TEXT and --input are both given")
    if not options.texts and input_ == STANDARD and sys.stdin is None:
        parser.error("no TEXT was given, and standard input is closed")
    if output == STANDARD:
        if options.resume or options.overwrite:
            parser.error("--resume and --overwrite are about a file: give --output")
        return
    if options.texts or options.stream:
        parser.error("--output is for whole lines of an input: give no TEXT, and not --stream")
    if output.suffix == COMPRESSED:
        parser.error(f"--output {output}: an output is not compressed")
    if output.exists():
        if input_.exists() and output.samefile(input_):
            parser.error("--input and --output are the same file")
        if not (options.resume or options.overwrite):
            parser.error(f"{output} exists: continue it with --resume, or write it anew with --overwrite")


def _translation(options: argparse.Namespace) -> Translation:
    parser: argparse.ArgumentParser = options.parser
    _check_files(options)
    attention_file: Path | None = options.attention
    if attention_file is not None:
        if attention_file.suffix not in (_IMAGE, _DATA):
            parser.error(f"--attention {attention_file}: the name must end in {_IMAGE} or {_DATA}")
        if len(options.texts) != 1:
            parser.error(f"--attention shows one text, and {len(options.texts) or 'no'} TEXT was given")
        if options.stream and options.json:
            parser.error("--attention goes with --stream or with --json, not with both")
        if options.long_source in _SPLITTING:
            parser.error("--attention shows one sentence, and --long-source split may make several")
        if not attention_file.parent.is_dir():
            parser.error(f"--attention {attention_file}: there is no folder {attention_file.parent}")
    for name in _ONLY_IN_JSON:
        if getattr(options, name) and not options.json:
            parser.error(f"what --{name.replace('_', '-')} asks for is shown with --json only")
    if options.long_source in _SPLITTING and (options.num_hypotheses or 1) > 1 and not options.json:
        parser.error("with --long-source split the hypotheses of each sentence are only in --json")
    generate_options = GenerateOptions(attention=attention_file is not None)
    for name in _OPTIONS:
        try:
            generate_options.MergeFrom(GenerateOptions(**{name: getattr(options, name)}))
        except ValueError as error:
            parser.error(f"--{name.replace('_', '-')}: {error}")
    return Translation(
        texts=tuple(options.texts),
        input=options.input,
        output=options.output,
        resume=options.resume,
        overwrite=options.overwrite,
        in_flight=options.in_flight,
        give_up_seconds=options.give_up_seconds
        or (_TEXT_SECONDS if options.texts else DEFAULT_GIVE_UP_SECONDS),
        model=options.model,
        options=generate_options,
        stream=options.stream,
        as_json=options.json,
        attention_file=attention_file,
    )


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="the server's address (default %(default)s)",
    )
    common.add_argument(
        "--timeout-seconds",
        type=_seconds,
        default=DEFAULT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="deadline of each call to the server (default %(default)g)",
    )
    add = common.add_argument
    add("--tls", action="store_true", help="encrypt the connection (any other --tls flag does so, too)")
    add(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="PEM file: trust servers whose certificate this authority signed",
    )
    add("--tls-certificate", type=Path, metavar="FILE", help="PEM file: this client's certificate, for mTLS")
    add("--tls-key", type=Path, metavar="FILE", help="PEM file: the private key of that certificate")
    add("--token-file", type=Path, metavar="FILE", help="file with the access token of this client")
    parser = argparse.ArgumentParser(
        prog="python -m client",
        description="Call a seq2seq server.",
        epilog='example: python -m client translate "오늘은 금요일 입니다" --attention attention.png',
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *, description: str = "", epilog: str = "") -> argparse.ArgumentParser:
        description = description or f"{text[0].upper()}{text[1:]}."
        # Without abbreviations: `--target HOST` must not be a shorter `--target-prefix`.
        return commands.add_parser(
            name, parents=[common], allow_abbrev=False, help=text, description=description, epilog=epilog
        )

    _add_translate(command)
    score = command(
        "score",
        "score a given target of a source",
        description="Print the log-probability of every target token, the end last, and their sum.",
        epilog='example: python -m client score "나는 학생이다" "I am a student."',
    )
    score.add_argument("source", metavar="SOURCE", help="the source text")
    score.add_argument("target", metavar="TARGET", help="the target text")
    score.add_argument("--model", default="", help="the model's name (default: the server's first)")
    score.add_argument("--json", action="store_true", help="print everything that the server answers")
    models = command("models", "list the models that the server serves")
    versions = command(
        "versions",
        "list the versions on the server's disk, and whether they are served (needs the role admin)",
    )
    versions.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="the model's name (default: all models)"
    )
    load = command(
        "load",
        "load a version of a model, and serve it from then on (needs the role admin)",
        epilog="example: python -m client load demo --version 2 --timeout-seconds 300",
    )
    load.add_argument("model", metavar="MODEL", help="the model's name")
    load.add_argument(
        "--version", default="", metavar="NAME", help="the version's folder (default: the newest)"
    )
    unload = command("unload", "stop serving a model (needs the role admin)")
    unload.add_argument("model", metavar="MODEL", help="the model's name")
    for listing in (models, versions, load):
        listing.add_argument("--json", action="store_true", help="print one JSON object a line")
    health = command("health", "print whether the server serves; the exit code is 0 if it does, and 1 if not")
    health.add_argument(
        "--metrics-url", metavar="URL", help="ask the metrics port instead, such as http://localhost:9464"
    )
    health.add_argument(
        "service",
        nargs="?",
        default="",
        metavar="NAME",
        help="a service or a model (default: the whole server)",
    )
    for each in commands.choices.values():
        each.set_defaults(parser=each)  # an error shows its usage
    return parser


def _add_translate(command: Callable[..., argparse.ArgumentParser]) -> None:
    translation = command(
        "translate",
        "translate texts, or the lines of a file",
        description="Translate texts, or the lines of a file or of standard input. The output has one line "
        "for each (with --num-hypotheses N: N lines), in order. The line is blank where the input is, and "
        "where a text fails: stderr has the error, the others go on, and the exit code is 1. The answer to a "
        "single TEXT keeps its line breaks, and where it fails, nothing is printed. The client waits for a "
        "server that restarts or is overloaded.",
        epilog="examples: python -m client translate 오늘은 --stream; "
        "python -m client translate --input corpus.ko --output corpus.en --resume",
    )
    add = translation.add_argument
    add("texts", nargs="*", metavar="TEXT", help="a text to translate; without any, the lines of --input")
    add(
        "--input",
        type=Path,
        default=STANDARD,
        metavar="FILE",
        help="texts, one a line; .gz is decompressed (default: -, which is standard input)",
    )
    add(
        "--output",
        type=Path,
        default=STANDARD,
        metavar="FILE",
        help="where the answers go; an existing file needs --resume or --overwrite (default: -, which is "
        "standard output)",
    )
    existing = translation.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        action="store_true",
        help="go on after the last whole line of --output, where the same command was interrupted",
    )
    existing.add_argument("--overwrite", action="store_true", help="replace an existing --output")
    add(
        "--in-flight",
        type=_count,
        default=DEFAULT_IN_FLIGHT,
        metavar="N",
        help="the most calls at a time; while the server is overloaded, fewer (default %(default)s)",
    )
    add(
        "--give-up-seconds",
        type=_seconds,
        metavar="SECONDS",
        help="stop after this time without any answer from the server (default "
        f"{DEFAULT_GIVE_UP_SECONDS:g}; {_TEXT_SECONDS:g} where a TEXT is given)",
    )
    add("--model", default="", help="the model's name (default: the server's first)")
    add("--stream", action="store_true", help="print the pieces of an answer as they are decoded")
    add(
        "--json", action="store_true", help="print everything that the server answers, one JSON object a line"
    )
    add(
        "--attention",
        type=Path,
        metavar="FILE",
        help="also write the alignment of a TEXT: as a heatmap (.png) or as numbers (.json)",
    )
    for name, (type_, metavar, text) in _OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        if type_ is bool:
            add(flag, action="store_true", help=text)
        else:
            add(flag, type=type_, metavar=metavar, help=text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
