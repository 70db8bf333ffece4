"""Reads the named sources of a request into the arrays that a model encodes, each by its form.

A source that does not fit is refused before it takes memory or time: a file by its headers, a tensor by its
shape, a story by its length. A single text or sound, which may be split, is read in `sources`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from seq2seq_serve.bundle import audio, pictures
from seq2seq_serve.bundle.characters import is_blank
from seq2seq_serve.bundle.names import Form
from seq2seq_serve.bundle.pictures import PictureError, read_frames, read_picture
from seq2seq_serve.bundle.sentences import MAX_WORDS, split_sentences
from seq2seq_serve.protos.seq2seq_v1_pb2 import Source
from seq2seq_serve.server.engine.request import Array
from seq2seq_serve.server.errors import BlankSource, InvalidRequest, SoundTooLong
from seq2seq_serve.server.models.served import ServedModel, SourceSpec
from seq2seq_serve.server.service.fair_thread import YieldPoint

# Cutting a text into tokens takes time, so its bytes are counted before. Texts of human authors have fewer
# bytes per token, before and after normalisation, so texts that fit are not refused.
MAX_BYTES_PER_TOKEN = 64
_SENTENCES_AT_ONCE = 16  # of a story, each of which has at most four kilobytes
MAX_MAGNITUDE = 65504  # of a feature: float16's largest number, so that every precision holds it
MAX_TIMES_TOO_LONG = 16  # the usual bytes of a text, or the usual length of a sound, to split or truncate
# Of windows that are shorter than whole ones, in seconds: the least silence after the sound, the shortest
# window, and from one length to the next. `benchmarks.quality.short_windows` measures the words that change.
_WINDOW_MARGIN_SECONDS, _LEAST_WINDOW_SECONDS, _WINDOW_STEP_SECONDS = 2.0, 10.0, 1.0
MAX_WINDOWS = 50  # the usual length of a sound that is decoded in windows: for Whisper 25 minutes

# The fields of `Source` that can hold a source, and the datatypes of its tensor
VALUES = {
    Form.TEXT: ("text", "token_ids"),
    Form.SENTENCES: ("text", "tensor"),
    Form.PICTURE: ("file", "tensor"),
    Form.CLIP: ("file", "tensor"),
    Form.FEATURES: ("tensor",),
    Form.SOUND: ("file", "tensor"),
}
TENSOR_DATATYPES = {
    Form.SENTENCES: ("INT64",),
    Form.PICTURE: ("UINT8", "FP32"),
    Form.CLIP: ("UINT8", "FP32"),
    Form.FEATURES: ("FP32",),
    Form.SOUND: ("FP32",),
}
_DTYPES: dict[str, np.dtype[Any]] = {
    "UINT8": np.dtype("u1"),
    "INT64": np.dtype("<i8"),
    "FP32": np.dtype("<f4"),
}


@dataclass(frozen=True)
class Input:
    """One source of a request, whose name and kind of value fit the model.

    Attributes:
        model: The model that reads it.
        name: The model's name for it.
        spec: The model's description of it.
        source: The message.
        kind: The field of the message that holds the value.
        field: The path of the value in the request.
    """

    model: ServedModel
    name: str
    spec: SourceSpec
    source: Source
    kind: str
    field: str


def named_inputs(sources: Sequence[Source], model: ServedModel) -> list[Input]:
    """Returns the sources of a request, one for each that the model has.

    Raises:
        InvalidRequest: Their number, a name or a kind of value does not fit the model.
    """
    names = ", ".join(model.sources)
    is_only = len(model.sources) == 1
    if len(sources) != len(model.sources):
        raise InvalidRequest(
            f"the request has {len(sources)} sources, and {model.name} takes exactly {len(model.sources)}: "
            f"{names}",
            field="sources",
        )
    inputs: dict[str, Input] = {}
    for index, source in enumerate(sources):
        field = f"sources[{index}]"
        name = source.name or (names if is_only else "")
        if name not in model.sources:
            there = (
                f"its only one is {names!r}, and the name may be left empty" if is_only else f"send {names}"
            )
            raise InvalidRequest(
                f"{model.name} has no source named {source.name[:100]!r}: {there}",
                field=f"{field}.name",
            )
        if name in inputs:
            raise InvalidRequest(
                f"two sources are named {name}, and {model.name} takes one of each: {names}",
                field=f"{field}.name",
            )
        spec, kind = model.sources[name], source.WhichOneof("value")
        if kind not in VALUES[spec.form]:
            given = "is empty" if kind is None else f"is sent as {kind}"
            raise InvalidRequest(
                f"the source {name} {given}, and {model.name} reads {spec.form}: "
                f"send {' or '.join(VALUES[spec.form])}",
                field=field,
            )
        inputs[name] = Input(model, name, spec, source, kind, f"{field}.{kind}")
    return list(inputs.values())


class FileCost(NamedTuple):
    """The cost of reading a file, by its headers.

    Attributes:
        num_pixels: The number of pixels that take as long to decode.
        num_bytes: The memory that decoding takes.
        num_array_bytes: The most memory of the arrays that are read from it.
    """

    num_pixels: int
    num_bytes: int
    num_array_bytes: int


def cost_of_pictures(given: Input) -> FileCost:
    """Returns what it costs to read the file of a picture or clip.

    Raises:
        InvalidRequest: The file exceeds a limit.
    """
    max_frames = given.model.sizing.max_source_length if given.spec.form is Form.CLIP else None
    with _refusing_damage(given):
        cost = pictures.cost(given.source.file, max_frames)
    frame_bytes = math.prod(axis for axis in given.spec.axes if isinstance(axis, int))
    num_array_bytes = cost.num_frames * frame_bytes
    return FileCost(cost.num_pixels, cost.num_bytes + num_array_bytes, num_array_bytes)


def cost_of_sound(given: Input, longest_seconds: float, *, hint: str) -> audio.SoundCost:
    """Returns what it costs to read the file of a sound; raises as `read_samples`, as its header tells."""
    with _refusing_damage(given, hint):
        return audio.cost(given.source.file, longest_seconds, given.source.file_type)


def read_input(given: Input, checkpoint: YieldPoint) -> tuple[Array, list[str]]:
    """Returns the array of a source, and the sentences if it is a story.

    Args:
        given: The source.
        checkpoint: Is called after each frame of a clip, and before some sentences of a story; an error that
            it raises ends the work.

    Raises:
        InvalidRequest: The source does not fit; the error names the field and what it must be.
    """
    if given.spec.form is Form.TEXT:
        return _read_words(given), []
    if given.spec.form is Form.SENTENCES:
        return _read_sentences(given, checkpoint)
    if given.spec.form in (Form.FEATURES, Form.SOUND):
        return _read_features(given), []
    return _read_pixels(given, checkpoint), []


def max_seconds(spec: SourceSpec) -> float:
    """Returns the length of a sound that the model reads at once."""
    num_frames = spec.axes[1]
    assert isinstance(num_frames, int)
    return num_frames * audio.HOP / audio.SAMPLE_RATE


def position_seconds(model: ServedModel) -> float:
    """Returns the length of a sound's part that one position of memory stands for."""
    [spec] = model.sources.values()
    return max_seconds(spec) / model.max_memory_length


def short_window(num_samples: int, model: ServedModel) -> int:
    """Returns the frames of the window in which a model hears so much sound: as few as do not change words.

    There are few lengths, because an encode call takes sounds of one length.
    """
    [spec] = model.sources.values()
    num_frames = spec.axes[1]
    assert isinstance(num_frames, int)
    if not model.takes_short_windows:
        return num_frames
    seconds = max(num_samples / audio.SAMPLE_RATE + _WINDOW_MARGIN_SECONDS, _LEAST_WINDOW_SECONDS)
    steps = math.ceil(seconds / _WINDOW_STEP_SECONDS)
    return min(round(steps * _WINDOW_STEP_SECONDS * audio.SAMPLE_RATE / audio.HOP), num_frames)


def read_samples(given: Input, longest_seconds: float, checkpoint: YieldPoint, *, hint: str) -> audio.Samples:
    """Returns the samples of a file.

    Raises:
        InvalidRequest: The file is not a sound, or is longer than `longest_seconds`; `hint` says what to do.
    """
    with _refusing_damage(given, hint):
        return audio.read_sound(given.source.file, longest_seconds, checkpoint, given.source.file_type)


def check_visible(text: str, field: str, what: str = "the text") -> None:
    """Refuses a text without a visible character; the message names it `what`."""
    if not text:
        raise BlankSource(f"{what} is empty", field=field)
    if is_blank(text):
        raise BlankSource(f"{what} has only white space and invisible characters", field=field)


def check_bytes(text: str, max_tokens: int, model: ServedModel, field: str, what: str = "the text") -> None:
    """Refuses a text that is too long for `max_tokens`, before it is cut into tokens."""
    num_bytes = len(text.encode())
    if num_bytes > max_tokens * MAX_BYTES_PER_TOKEN:
        raise InvalidRequest(
            f"{what} has {num_bytes} bytes, and {model.name} takes at most {max_tokens} tokens, "
            f"never more than {max_tokens * MAX_BYTES_PER_TOKEN} bytes: send shorter pieces",
            field=field,
        )


def check_ids(
    token_ids: Iterable[int], model: ServedModel, field: str, *, vocab_size: int | None = None
) -> None:
    """Refuses token ids that the model does not have: ids of targets, unless another size is given."""
    vocab_size = vocab_size or model.sizing.vocab_size
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is outside the vocabulary of {model.name}: "
                f"ids go from 0 to {vocab_size - 1}",
                field=f"{field}[{index}]",
            )


def check_source_ids(token_ids: Sequence[int], given: Input) -> None:
    """Refuses token ids of a source that the model does not have, and padding.

    Training never lets a model read padding, and the served graphs read every id that they are given.
    """
    model, field = given.model, f"{given.field}.values"
    check_ids(token_ids, model, field, vocab_size=model.manifest.source_vocab_size)
    if model.pad_id in token_ids:
        raise InvalidRequest(
            f"token id {model.pad_id} is padding, which {model.name} does not read: leave it out, or send "
            "the rows' own lengths",
            field=f"{field}[{list(token_ids).index(model.pad_id)}]",
        )


def _too_many(num: int, unit: str, most: int, given: Input) -> InvalidRequest:
    """Returns the error for a source that has more of something than the model takes."""
    return InvalidRequest(
        f"{given.name} has {num} {unit}, and {given.model.name} takes at most {most}: send fewer",
        field=given.field,
    )


def _read_words(given: Input) -> Array:
    """Returns a text beside other sources, `(W,)` int64, without special tokens."""
    model = given.model
    if given.kind == "text":
        text, what = given.source.text, f"{given.name}: the text"
        check_visible(text, given.field, what)
        check_bytes(text, MAX_WORDS, model, given.field, what)
        token_ids: Sequence[int] = model.source_tokenizer.encode(text)
    else:
        token_ids = given.source.token_ids.values
    if not token_ids:
        raise InvalidRequest(f"{given.name} has no tokens: send at least one", field=given.field)
    if len(token_ids) > MAX_WORDS:
        raise _too_many(len(token_ids), "tokens", MAX_WORDS, given)
    check_source_ids(token_ids, given)
    return np.array(token_ids, np.int64)


def _read_sentences(given: Input, checkpoint: YieldPoint) -> tuple[Array, list[str]]:
    """Returns a story, `(N, W)` int64 with padding after the words of each sentence, and its sentences."""
    model = given.model
    if given.kind == "tensor":
        story = _read_tensor(given)
        _check_story(story, given)
        lengths = (story != model.pad_id).sum(axis=1)
        tokenizer = model.source_tokenizer
        texts = [tokenizer.decode(row[:length]) for row, length in zip(story.tolist(), lengths, strict=True)]
        return story[:, : lengths.max()], texts
    text, most = given.source.text, model.sizing.max_source_length
    num_bytes, max_bytes = len(text.encode()), most * MAX_WORDS * MAX_BYTES_PER_TOKEN
    if num_bytes > max_bytes:
        raise InvalidRequest(
            f"{given.name} has {num_bytes} bytes, and {model.name} takes at most {most} sentences of "
            f"{MAX_WORDS} words, never more than {max_bytes} bytes: send a shorter one",
            field=given.field,
        )
    texts = split_sentences(text)
    if not texts:
        raise BlankSource(f"{given.name} has no sentences: send at least one", field=given.field)
    if len(texts) > most:
        raise _too_many(len(texts), "sentences", most, given)
    rows: list[list[int]] = []
    for first in range(0, len(texts), _SENTENCES_AT_ONCE):
        checkpoint()
        several = texts[first : first + _SENTENCES_AT_ONCE]
        for number, sentence in enumerate(several, start=first + 1):
            what = f"sentence {number} of {given.name}"
            check_bytes(sentence, MAX_WORDS, model, given.field, what)
        rows += model.source_tokenizer.encode_batch(several)
    story = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for number, (row, token_ids) in enumerate(zip(story, rows, strict=True), start=1):
        if not 1 <= len(token_ids) <= MAX_WORDS:
            advice = "send shorter sentences" if token_ids else "leave it out"
            raise InvalidRequest(
                f"sentence {number} of {given.name} has {len(token_ids)} words, and {model.name} takes 1 to "
                f"{MAX_WORDS}: {advice}",
                field=given.field,
            )
        row[: len(token_ids)] = token_ids
    return story, texts


def _check_story(story: Array, given: Input) -> None:
    model = given.model
    outside = np.argwhere((story < 0) | (story >= model.manifest.source_vocab_size))
    if len(outside):
        place = outside[0].tolist()
        raise InvalidRequest(
            f"token id {story[tuple(place)]} at {place} of {given.name} is outside the vocabulary of "
            f"{model.name}: ids go from 0 to {model.manifest.source_vocab_size - 1}",
            field=f"{given.field}.data",
        )
    is_word = story != model.pad_id
    is_wrong = ~is_word[:, 0] | (is_word[:, 1:] > is_word[:, :-1]).any(axis=1)
    if is_wrong.any():
        raise InvalidRequest(
            f"sentence {is_wrong.argmax() + 1} of {given.name} is empty, or has padding (id {model.pad_id}) "
            "before a word: put padding after the words",
            field=f"{given.field}.data",
        )


def _read_pixels(given: Input, checkpoint: YieldPoint) -> Array:
    """Returns a picture `(size, size, 3)`, or a clip with frames before that, as uint8."""
    size = given.spec.axes[-2]
    assert isinstance(size, int)
    if given.kind == "file":
        with _refusing_damage(given):
            if given.spec.form is Form.PICTURE:
                return read_picture(given.source.file, size, given.spec.resampling)
            frames = []
            for frame in read_frames(given.source.file, size, given.model.sizing.max_source_length):
                frames.append(frame)
                checkpoint()
            return np.stack(frames)
    pixels = _read_tensor(given)
    if pixels.dtype == np.uint8:
        return pixels
    _check_range(pixels, 0, 1, given, ": divide by 255, or send UINT8")
    return np.rint(pixels * np.float32(255)).astype(np.uint8)


@contextmanager
def _refusing_damage(given: Input, hint: str = "") -> Iterator[None]:
    """Turns the errors of reading a file into `InvalidRequest`; `hint` is for a long sound."""
    try:
        yield
    except audio.SoundTooLongError as error:
        message = f"{given.name}: {error}: send a shorter one{hint}"
        raise SoundTooLong(message, field=given.field) from error
    except (PictureError, audio.SoundError) as error:
        raise InvalidRequest(f"{given.name}: {error}", field=given.field) from error


def _read_features(given: Input) -> Array:
    """Returns annotations `(M, width)` or a spectrogram `(bands, frames)` of the caller, float32."""
    features = _read_tensor(given)
    _check_range(features, -MAX_MAGNITUDE, MAX_MAGNITUDE, given)
    return features


def _check_range(array: Array, least: int, most: int, given: Input, advice: str = "") -> None:
    is_within = (array >= least) & (array <= most)  # NaN is not
    if not is_within.all():
        place = np.argwhere(~is_within)[0].tolist()
        raise InvalidRequest(
            f"{given.name} is {array[tuple(place)]:g} at {place}, and must be from {least} to {most}{advice}",
            field=f"{given.field}.data",
        )


def _read_tensor(given: Input) -> Array:
    """Returns the array of a tensor that has the datatype and shape of the model's source."""
    model, tensor, datatypes = given.model, given.source.tensor, TENSOR_DATATYPES[given.spec.form]
    if tensor.datatype not in datatypes:
        raise InvalidRequest(
            f"{given.name} has the datatype {tensor.datatype[:100]!r}, and {model.name} takes "
            f"{' or '.join(datatypes)}",
            field=f"{given.field}.datatype",
        )
    # Of the axes without a fixed size the first counts positions, and the second the words of a sentence.
    limits = iter((model.sizing.max_source_length, MAX_WORDS))
    bounds = [(axis, axis) if isinstance(axis, int) else (1, next(limits)) for axis in given.spec.axes]
    shape = list(tensor.shape)
    fits = len(shape) == len(bounds) and all(
        least <= size <= most for size, (least, most) in zip(shape, bounds, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(most) if least == most else f"{least} to {most}" for least, most in bounds)
        raise InvalidRequest(
            f"{given.name} has the shape {shape[:16]}, and {model.name} takes [{wanted}]",
            field=f"{given.field}.shape",
        )
    dtype = _DTYPES[tensor.datatype]
    num_bytes, expected = len(tensor.data), math.prod(shape) * dtype.itemsize
    if num_bytes != expected:
        raise InvalidRequest(
            f"{given.name} has {num_bytes} bytes of data, and {tensor.datatype} of the shape {shape} has "
            f"{expected}",
            field=f"{given.field}.data",
        )
    array: Array = np.frombuffer(tensor.data, dtype)
    return array.reshape(shape)
