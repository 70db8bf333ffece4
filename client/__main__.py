"""Call a server from the command line: `python -m client translate "오늘은 금요일 입니다"`.

Answers go to stdout, errors and warnings to stderr. The exit code is 0 if every text was answered, 1 if
something failed, and 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path

from google.protobuf.message import Message

from seq2seq_serve.client.aio import AsyncClient
from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.files.plan import JobError
from seq2seq_serve.client.flags import generation, make_parser, transcription, translations
from seq2seq_serve.client.forms import CLIP, FEATURES, PICTURE, SENTENCES, SOUND, find_model
from seq2seq_serve.client.output import in_flags, one_line, to_json
from seq2seq_serve.client.questions import answer, caption, transcribe
from seq2seq_serve.client.sync import Client
from seq2seq_serve.client.translate import translate_all
from seq2seq_serve.client.wire import Tls
from seq2seq_serve.commands import needs_extra, write_any_text
from seq2seq_serve.doctor import report
from seq2seq_serve.protos.dicts import message_dict
from seq2seq_serve.protos.seq2seq_v1_pb2 import Model, Version, VersionState

# What `Model.max_source_length` counts, by form
_UNITS = {
    SENTENCES: "sentences",
    PICTURE: "places",
    CLIP: "frames",
    FEATURES: "annotations",
    SOUND: "positions",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code."""
    options = make_parser().parse_args(arguments)
    write_any_text()
    try:
        if options.command == "doctor":
            return report(options.bundle)
        if options.command == "translate":
            plans = translations(options)
        elif options.command == "caption":
            generate_options = generation(options)
        elif options.command == "transcribe":
            generate_options = transcription(options)
        elif options.command == "health" and options.metrics_url:
            return _readiness(options.metrics_url, options.timeout_seconds)
        token = _token(options.token_file) if options.token_file else ""
        connection = {"timeout_seconds": options.timeout_seconds, "tls": _tls(options), "token": token}
        connect = partial(AsyncClient, options.address, **connection)
        if options.command == "web":
            return _web(options, connect)
        with Client(options.address, **connection) as client:
            if options.command == "translate":
                return translate_all(client, connect, plans)
            if options.command == "score":
                return _score(client, options)
            if options.command == "answer":
                answer(client, options)
                return 0
            if options.command == "caption":
                caption(client, options, generate_options)
                return 0
            if options.command == "transcribe":
                transcribe(client, connect, options, generate_options)
                return 0
            return _about_the_server(client, options)
    except BrokenPipeError:
        # The reader of our output has closed the pipe. Without this, Python's flush at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # of a command that SIGPIPE ends, such as cat
    except OSError as error:
        return _report(error, f"error: {error.filename or 'output'}: {error.strerror}")
    except ClientError as error:
        return _report(error, f"error: {in_flags(error)}{_advice(error, options)}")
    except JobError as error:
        return _report(error, f"error: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        _report(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 143


def _web(options: argparse.Namespace, connect: Callable[[], AsyncClient]) -> int:
    with needs_extra("web"):
        from seq2seq_serve.client.web.app import serve
    serve(connect, options.metrics_url.rstrip("/"), options.host, options.port)
    return 0


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


def _advice(error: ClientError, options: argparse.Namespace) -> str:
    """Returns the flag that may help against an error of the connection."""
    if error.code == "UNAUTHENTICATED" and not options.token_file:
        return ": give --token-file"
    if error.code == "UNAVAILABLE" and "CERTIFICATE_VERIFY_FAILED" in error.message and not options.tls_ca:
        return ": give --tls-ca, the certificate of the server's authority"
    return ""


def _report(error: BaseException, *lines: str) -> int:
    sys.stderr.writelines(f"{line}\n" for line in (*lines, *getattr(error, "__notes__", ())))
    return 1


def _score(client: Client, options: argparse.Namespace) -> int:
    model = find_model(client, options.model, "score").name
    try:
        answer = client.score(
            options.source,
            options.target,
            model=model,
            source_language=options.source_language,
            target_language=options.target_language,
            task=options.task,
        )
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
    sources = ", ".join(f"{name} ({_form(model, name)})" for name in sorted(model.sources))
    unit = next((unit for form, unit in _UNITS.items() if form in model.sources.values()), "tokens")
    return (
        f"{model.name}: {model.kind}, version {model.version}, {model.precision} on {model.provider}, "
        f"{model.num_slots} slots, {model.vocab_size} tokens in the vocabulary, takes {sources} up to "
        f"{model.max_source_length} {unit}, targets up to {model.max_target_length} tokens, "
        f"{'with' if model.has_attention else 'without'} attention"
        + ", a text sentence by sentence" * model.splits_sentences
        + ", with a draft model" * model.has_draft_model
    )


def _form(model: Model, name: str) -> str:
    """The form of a source, and the shape of its tensor if that is the model's own."""
    sizes = model.source_shapes[name].sizes if name in model.source_shapes else []
    shape = " x ".join("any" if size < 0 else str(size) for size in sizes)
    return f"{model.sources[name]}, {shape}" if any(size > 0 for size in sizes) else model.sources[name]


def _version_line(version: Version) -> str:
    state = VersionState.Name(version.state).removeprefix("VERSION_STATE_").lower()
    reason = f": {one_line(version.reason)}" if version.reason else ""
    return f"{version.model}, version {version.version}: {state}{reason}"


if __name__ == "__main__":
    sys.exit(main())
