"""Runs the commands with one source and one answer: `answer`, `caption` and `transcribe`."""

from __future__ import annotations

import argparse
import asyncio
import io
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from seq2seq_serve.client.aio import AsyncClient
from seq2seq_serve.client.attention import DATA, save_hops, save_looks
from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.files.lines import STANDARD, read_file, read_text
from seq2seq_serve.client.forms import (
    FEATURES,
    SENTENCES,
    SOUND,
    TEXT,
    find_captioner,
    find_model,
    source_of,
)
from seq2seq_serve.client.output import length_advice, one_line, to_json
from seq2seq_serve.client.speech.listen import listen
from seq2seq_serve.client.speech.parts import transcribe_parts
from seq2seq_serve.client.speech.sounds import opened
from seq2seq_serve.client.speech.transcript import Transcript
from seq2seq_serve.client.sync import Client
from seq2seq_serve.client.wire import MAX_REQUEST_BYTES
from seq2seq_serve.commands import needs_extra
from seq2seq_serve.documents.segments import wrong_file
from seq2seq_serve.protos.dicts import message_dict
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    FINISH_REASON_LENGTH,
    LONG_SOURCE_SEQUENTIAL,
    GenerateOptions,
    GenerateResponse,
    Source,
)
from seq2seq_serve.protos.sources import Value

_IN_PARTS = (
    "a file of more than 4 MiB, one with --output and telephone samples are sent in parts, as a stream"
)
_TOO_LONG = "SOUND_TOO_LONG"  # the server's reason
_MAX_FILE_BYTES = MAX_REQUEST_BYTES - 2**17  # of a sound in one request, whose prompt may have 64 KiB


def answer(client: Client, options: argparse.Namespace) -> None:
    """Prints the answer to a question about a story, and with --top the most probable answers.

    Raises:
        ClientError: The server refuses the story or the question, or does not have a model for them.
        OSError: The story cannot be read, or the attention cannot be written.
    """
    model = find_model(client, options.model, "answer")
    story = read_text(options.story)
    sources = {source_of(model, SENTENCES): story, source_of(model, TEXT): options.question}
    generate_options = GenerateOptions(
        attention=options.attention is not None, num_alternatives=options.top or 0
    )
    response = _generate(client, sources, model.name, generate_options)
    best = response.hypotheses[0]
    if options.json:
        _print(to_json(message_dict(response)))
    else:
        _print(best.text)
        for alternative in best.alternatives[0].tokens if options.top else ():
            probability = math.exp(alternative.log_probability)
            _print(f"{probability:8.4f}  {one_line(alternative.text).strip()}")
    _warn_of_limit("answer", response, generate_options)
    if response.unknown_words:
        words = ", ".join(map(one_line, response.unknown_words))
        sys.stderr.write(f"warning: {model.name} does not know {words}: an answer about these is a guess\n")
    if options.attention is not None:
        save_hops(best, options.question, options.attention)


def caption(client: Client, options: argparse.Namespace, generate_options: GenerateOptions) -> None:
    """Prints the caption of a picture, a clip or features; with --num-hypotheses a line for each of several.

    Raises:
        ClientError: The server refuses the file, does not have a model for it, or has several.
        OSError: The file cannot be read, does not hold features, or the attention cannot be written.
    """
    content = read_file(options.file)
    model = find_captioner(client, options.model, content)
    [(name, form)] = model.sources.items()
    path: Path | None = options.attention
    if path is not None and path.suffix != DATA and form == FEATURES:
        hint = f"which cannot be drawn: write the attention to a {DATA} file"
        raise ClientError("INVALID_ARGUMENT", f"{model.name} takes features, {hint}")
    try:
        value: Value = read_features(content, options.file) if form == FEATURES else content
        response = _generate(client, {name: value}, model.name, generate_options)
        if options.json:
            _print(to_json(message_dict(response)))
        else:
            _print("\n".join(one_line(hypothesis.text) for hypothesis in response.hypotheses))
        _warn_of_limit("caption", response, generate_options)
        if path is not None:
            save_looks(response.hypotheses[0], content, form, path)
    except ValueError as error:
        raise ClientError.from_value_error(error) from error


def transcribe(
    client: Client,
    connect: Callable[[], AsyncClient],
    options: argparse.Namespace,
    generate_options: GenerateOptions,
) -> None:
    """Prints the transcript of a sound; with --timestamps, --word-timestamps or --format, with times.

    A sound that is too large or too long for a request is sent in parts, and so is every one with --output.

    Args:
        client: A connection to the server.
        connect: Opens another one, on an event loop.
        options: The command's flags.
        generate_options: Of the transcript.

    Raises:
        ClientError: The server refuses the file, or does not have a model for it.
        OSError: The file cannot be read.
    """
    has_several = generate_options.num_hypotheses > 1
    generate_options.timestamps |= options.format is not None
    has_times = generate_options.timestamps or generate_options.word_timestamps
    if has_several and has_times and not options.json:
        options.parser.error(
            "--num-hypotheses needs --json with --timestamps or --format: they list one hypothesis"
        )
    model = find_model(client, options.model, "transcribe")
    if options.live:
        then = find_model(client, options.then, "translate") if options.then else None
        asyncio.run(listen(connect, model.name, then, options, generate_options))
        return
    with opened(options.file) as stream:
        in_parts = partial(transcribe_parts, connect, model.name, options, generate_options, stream)
        try:
            # Only a stream takes the encodings of telephones.
            if options.output != STANDARD or options.form.encoding not in ("file", "pcm_s16"):
                in_parts()
                return
            content = stream.read(_MAX_FILE_BYTES + 1)
            if len(content) > _MAX_FILE_BYTES:
                in_parts(content)
                return
        except ClientError as error:
            if any(violation.field.startswith("start.options.") for violation in error.field_violations):
                raise error.followed_by(_IN_PARTS) from error
            raise
    whole = GenerateOptions()
    whole.CopyFrom(generate_options)
    is_whole = has_several or whole.HasField("target_prefix")
    if is_split := not (whole.long_source or whole.stop_sequences or is_whole):
        whole.long_source = LONG_SOURCE_SEQUENTIAL
    sources: dict[str, Value] = {source_of(model, SOUND): Source(file=content, file_type=options.file_type)}
    try:
        response = _generate(client, sources, model.name, whole)
    except ClientError as error:
        if error.reason != _TOO_LONG or not is_split:
            raise
        transcribe_parts(connect, model.name, options, generate_options, io.BytesIO(), content)
        return
    if options.json:
        _print(to_json(message_dict(response)))
    elif has_times:
        transcript = Transcript(options.format, whole)
        segments = response.hypotheses[0].segments
        sys.stdout.write(transcript.beginning + "".join(map(transcript.text, segments)))
    else:
        _print("\n".join(one_line(hypothesis.text).strip() for hypothesis in response.hypotheses))
    _warn_of_limit("transcript", response, whole)


def _generate(
    client: Client, sources: dict[str, Value], model: str, options: GenerateOptions
) -> GenerateResponse:
    try:
        return client.generate(sources, model=model, options=options)
    except ValueError as error:
        raise ClientError.from_value_error(error) from error


def _warn_of_limit(what: str, response: GenerateResponse, options: GenerateOptions) -> None:
    """Writes a warning if an answer ended at its length limit."""
    if any(each.finish_reason == FINISH_REASON_LENGTH for each in response.hypotheses):
        # Only a bundle of translations bounds the length of targets by that of their source.
        is_set = options.HasField("max_new_tokens") or options.max_length_ratio
        advice = length_advice(options) if is_set else "this is the model's own limit"
        sys.stderr.write(f"warning: the {what} ended at its length limit ({advice})\n")


def read_features(content: bytes, path: Path) -> Value:
    """Returns the array of a file as float32.

    The header is read first: `numpy.load` would allocate whatever memory it declares.

    Raises:
        OSError: The file does not hold annotations; the error names it.
    """
    with needs_extra("drawing"):
        import numpy as np

    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        is_first = version == (1, 0)
        read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
    except Exception as error:  # NumPy raises errors of several classes for damaged headers
        raise wrong_file(path, "the file is not a NumPy array (.npy)") from error
    if dtype.kind not in "biuf":
        raise wrong_file(path, f"the array is of {dtype}, and must be of real numbers, such as float32")
    size = " x ".join(map(str, shape)) or "a single number"
    if len(shape) != 2:
        raise wrong_file(path, f"the array is {size}, and must be annotations x width")
    num_bytes, num_left = math.prod(shape) * dtype.itemsize, len(content) - stream.tell()
    if min(shape) < 0 or num_bytes > num_left:
        text = f"the array is {size} of {dtype}, {num_bytes} bytes, and the file has {num_left} bytes for it"
        raise wrong_file(path, f"{text}: it is truncated or damaged")
    array = np.frombuffer(content[stream.tell() :], dtype, math.prod(shape))
    array = array.reshape(shape, order="F" if is_fortran else "C")
    with np.errstate(all="ignore"):
        features = array.astype(np.float32)
    if (places := np.argwhere(np.isinf(features) & np.isfinite(array))).size:
        place = places[0].tolist()
        text = f"the array has {array[tuple(place)]} at {place}, which is beyond float32: scale it down"
        raise wrong_file(path, text)
    return features


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
