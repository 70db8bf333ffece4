"""Call a server from the command line: `python -m client translate "오늘은 금요일 입니다"`.

Answers go to stdout, errors and warnings to stderr. The exit code is 0 if every text was answered, 1 if
something failed, and 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path

from google.protobuf.message import Message

# gRPC's own log would repeat our errors in other words. gRPC reads this when it opens the first channel.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.files import COMPRESSED, STANDARD, WrongOutput
from seq2seq_serve.client.many import DEFAULT_GIVE_UP_SECONDS, DEFAULT_IN_FLIGHT
from seq2seq_serve.client.output import message_dict, one_line, to_json
from seq2seq_serve.client.sync import Client
from seq2seq_serve.client.translate import Translation, translate
from seq2seq_serve.client.wire import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_SECONDS, Tls
from seq2seq_serve.protos.options import OPTIONS, Option
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    LONG_SOURCE_SPLIT,
    LONG_SOURCE_SPLIT_ALWAYS,
    GenerateOptions,
    Model,
    Version,
    VersionState,
)

_IMAGE, _DATA = ".png", ".json"
_TEXT_SECONDS = 10.0  # a person waits for the answer to a TEXT: long enough to connect again, and no longer
# The flag of each generation option. `--attention` is not here, because its value is a file.
_FLAGS = {name: f"--{name.replace('_', '-')}" for name in OPTIONS if name != "attention"}
_ONLY_IN_JSON = ("log_probabilities", "num_alternatives", "word_alignment")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # Translations are in any alphabet, whatever the locale of the terminal is.
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
        # The reader of our output has closed the pipe. Without this, Python's flush at exit would fail.
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
        text = f"{path} does not hold a token: it has bytes that are not ASCII"
        raise ClientError("UNAUTHENTICATED", text) from error


def _tls(options: argparse.Namespace) -> Tls | None:
    files = Tls(options.tls_ca, options.tls_certificate, options.tls_key)
    if (files.certificate is None) != (files.key is None):
        options.parser.error("--tls-certificate and --tls-key must be given together")
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
        parser.error("TEXT and --input are both given: give one of them")
    if not options.texts and input_ == STANDARD and sys.stdin is None:
        parser.error("there is no TEXT, and standard input is closed: give a TEXT or --input")
    if output == STANDARD:
        if options.resume or options.overwrite:
            parser.error("--resume and --overwrite need --output FILE")
        return
    if options.texts or options.stream:
        parser.error("--output is for the lines of an input: leave out TEXT and --stream")
    if output.suffix == COMPRESSED:
        parser.error(f"--output {output}: the client does not compress its output: leave out {COMPRESSED}")
    if output.exists():
        if input_.exists() and output.samefile(input_):
            parser.error("--input and --output are the same file")
        if not (options.resume or options.overwrite):
            parser.error(f"{output} exists: continue it with --resume, or replace it with --overwrite")


def _translation(options: argparse.Namespace) -> Translation:
    parser: argparse.ArgumentParser = options.parser
    _check_files(options)
    attention_file: Path | None = options.attention
    generate_options = GenerateOptions(attention=attention_file is not None)
    for name in _FLAGS:
        generate_options.MergeFrom(getattr(options, name) or GenerateOptions())
    is_split = generate_options.long_source in (LONG_SOURCE_SPLIT, LONG_SOURCE_SPLIT_ALWAYS)
    if attention_file is not None:
        if attention_file.suffix not in (_IMAGE, _DATA):
            parser.error(f"--attention {attention_file}: the name must end in {_IMAGE} or {_DATA}")
        if len(options.texts) != 1:
            parser.error(f"--attention needs exactly one TEXT: {len(options.texts)} were given")
        if options.stream and options.json:
            parser.error("--attention works with --stream or with --json, not with both")
        if is_split:
            parser.error("--attention cannot show a text that --long-source splits")
        if not attention_file.parent.is_dir():
            parser.error(f"--attention {attention_file}: there is no folder {attention_file.parent}")
    for name in _ONLY_IN_JSON:
        if getattr(generate_options, name) and not options.json:
            parser.error(f"{_FLAGS[name]} needs --json: the text output does not show its result")
    if is_split and generate_options.num_hypotheses > 1 and not options.json:
        parser.error("--num-hypotheses needs --json where --long-source splits: it lists them by sentence")
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
        help="address of the server (default: %(default)s)",
    )
    common.add_argument(
        "--timeout-seconds",
        type=_seconds,
        default=DEFAULT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="deadline of each call to the server (default: %(default)g)",
    )
    add = common.add_argument
    add("--tls", action="store_true", help="encrypt the connection; every other --tls flag implies it")
    add(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="PEM file: the authority that signed the server's certificate",
    )
    add(
        "--tls-certificate",
        type=Path,
        metavar="FILE",
        help="PEM file: the certificate of this client, for mTLS",
    )
    add("--tls-key", type=Path, metavar="FILE", help="PEM file: the private key of that certificate")
    add("--token-file", type=Path, metavar="FILE", help="file with the token that identifies this client")
    parser = argparse.ArgumentParser(
        prog="python -m client",
        description="Call a seq2seq server.",
        epilog='example: python -m client translate "오늘은 금요일 입니다" --attention attention.png',
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *, description: str = "", epilog: str = "") -> argparse.ArgumentParser:
        description = description or f"{text[0].upper()}{text[1:]}."
        # Abbreviations are off: otherwise `--target HOST` would mean `--target-prefix HOST`.
        return commands.add_parser(
            name, parents=[common], allow_abbrev=False, help=text, description=description, epilog=epilog
        )

    _add_translate(command)
    score = command(
        "score",
        "score a given target for a source",
        description="Print the log-probability of every target token and of the end, and their sum.",
        epilog='example: python -m client score "나는 학생이다" "I am a student."',
    )
    score.add_argument("source", metavar="SOURCE", help="the source text")
    score.add_argument("target", metavar="TARGET", help="the target text")
    score.add_argument("--model", default="", help="name of the model (default: the server's first)")
    score.add_argument("--json", action="store_true", help="print the whole answer as a JSON object")
    models = command("models", "list the models that the server serves")
    versions = command(
        "versions",
        "list the versions of models on the server's disk, and their states (needs the role admin)",
    )
    versions.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="name of the model (default: all models)"
    )
    load = command(
        "load",
        "load a version of a model and start to serve it (needs the role admin)",
        epilog="example: python -m client load demo --version 2 --timeout-seconds 300",
    )
    load.add_argument("model", metavar="MODEL", help="name of the model")
    load.add_argument(
        "--version", default="", metavar="NAME", help="name of the version's folder (default: the newest)"
    )
    unload = command("unload", "stop serving a model (needs the role admin)")
    unload.add_argument("model", metavar="MODEL", help="name of the model")
    for listing in (models, versions, load):
        listing.add_argument("--json", action="store_true", help="print each entry as one line of JSON")
    health = command("health", "print whether the server is ready; the exit code is 0 if it is, and 1 if not")
    health.add_argument(
        "--metrics-url", metavar="URL", help="ask the metrics port instead, for example http://localhost:9464"
    )
    health.add_argument(
        "service",
        nargs="?",
        default="",
        metavar="NAME",
        help="name of a service or model (default: the whole server)",
    )
    for each in commands.choices.values():
        each.set_defaults(parser=each)  # an error shows its usage
    return parser


def _add_translate(command: Callable[..., argparse.ArgumentParser]) -> None:
    translation = command(
        "translate",
        "translate texts, or the lines of a file",
        description="Translate texts, or the lines of a file or of standard input. The output has one line "
        "for each text, or N lines with --num-hypotheses N, in the order of the texts. The line of a blank "
        "text is blank. If a text fails, its line is blank, too, stderr has the error, the client goes on "
        "with the other texts, and the exit code is 1. The answer to a single TEXT keeps its line breaks; if "
        "it fails, stdout stays empty. The client waits for a server that restarts or is overloaded.",
        epilog="examples: python -m client translate 오늘은 --stream; "
        "python -m client translate --input corpus.ko --output corpus.en --resume",
    )
    add = translation.add_argument
    add("texts", nargs="*", metavar="TEXT", help="a text to translate (default: the lines of --input)")
    add(
        "--input",
        type=Path,
        default=STANDARD,
        metavar="FILE",
        help="file of texts, one on each line; .gz is decompressed (default: -, standard input)",
    )
    add(
        "--output",
        type=Path,
        default=STANDARD,
        metavar="FILE",
        help="file for the answers; if it exists, give --resume or --overwrite (default: -, standard output)",
    )
    existing = translation.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted run of the same command after the last whole line of --output",
    )
    existing.add_argument("--overwrite", action="store_true", help="replace an existing --output file")
    add(
        "--in-flight",
        type=_count,
        default=DEFAULT_IN_FLIGHT,
        metavar="N",
        help="maximum number of calls in flight; fewer while the server is overloaded (default: %(default)s)",
    )
    add(
        "--give-up-seconds",
        type=_seconds,
        metavar="SECONDS",
        help="stop if the server has not answered any call for this time (default: "
        f"{DEFAULT_GIVE_UP_SECONDS:g}; with a TEXT: {_TEXT_SECONDS:g})",
    )
    add("--model", default="", help="name of the model (default: the server's first)")
    add("--stream", action="store_true", help="print each piece of an answer as soon as it is decoded")
    add(
        "--json",
        action="store_true",
        help="print whole answers, each as a line of JSON; with --stream, every piece, too",
    )
    add(
        "--attention",
        type=Path,
        metavar="FILE",
        help="also write the alignment of a TEXT to FILE, as a heatmap (.png) or as numbers (.json)",
    )
    for name, flag in _FLAGS.items():
        option = OPTIONS[name]
        text = re.sub(r"`(\w+)`", lambda match: _FLAGS[match[1]], option.help)
        text += " (needs --json)" * (name in _ONLY_IN_JSON)
        if option.is_switch:
            add(flag, action="store_const", const=option.read(True), help=text)
        else:
            add(flag, type=partial(_given, option), metavar=option.form.metavar, help=text)


def _given(option: Option, text: str) -> GenerateOptions:
    try:
        return option.read(text, is_text=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it is {text!r}, and {error}") from error


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
