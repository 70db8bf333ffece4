"""Reads how a long sound is decoded in windows, by Whisper's rules, and the text before a target."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from seq2seq_serve.protos.seq2seq_v1_pb2 import LONG_SOURCE_SEQUENTIAL, GenerateOptions
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.runner.voice_activity import SpeechRules
from seq2seq_serve.server.service.read.inputs import check_bytes

# Whisper's own (Radford et al. 2022, arXiv:2212.04356, section 4.5)
_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_COMPRESSION_RATIO, _LOG_PROBABILITY, _NO_SPEECH = 2.4, -1.0, 0.6
# Seconds of a pause at which speech ends: in windows, as Whisper was trained on speech with its shorter ones
_LEAST_PAUSE, _LEAST_GAP = 2.0, 0.16


@dataclass(frozen=True)
class WindowRules:
    """How the windows of a long sound are decoded.

    Attributes:
        temperatures: At which a window is decoded until its text is good; 0 takes the most probable tokens.
        is_conditioned: Whether a window is decoded with the text of those before it.
        max_compression_ratio: Of a good text.
        min_log_probability: The least mean log-probability of a good text's tokens.
        max_no_speech: The largest probability of no speech of a window that is not silent.
        hot_ids: Tokens that the decoder reads before the text before each window.
        always_listens: Whether that probability is computed for every window, at the cost of encoding it
            again; otherwise only for those that need it.
    """

    temperatures: tuple[float, ...]
    is_conditioned: bool
    max_compression_ratio: float
    min_log_probability: float
    max_no_speech: float
    hot_ids: tuple[int, ...] = ()
    always_listens: bool = False


def window_rules(options: GenerateOptions) -> WindowRules:
    """Returns the rules of a message, with Whisper's own where it does not set any."""

    def given(name: str, default: float) -> float:
        return round(getattr(options, name), 6) if options.HasField(name) else default  # in float32

    return WindowRules(
        temperatures=(options.temperature,) if options.temperature else _TEMPERATURES,
        is_conditioned=options.condition_on_previous or not options.HasField("condition_on_previous"),
        max_compression_ratio=given("compression_ratio_threshold", _COMPRESSION_RATIO),
        min_log_probability=given("log_probability_threshold", _LOG_PROBABILITY),
        max_no_speech=given("no_speech_threshold", _NO_SPEECH),
    )


def speech_rules(options: GenerateOptions) -> SpeechRules:
    """Returns where speech begins and ends in a sound, by how it is decoded."""
    return SpeechRules(_LEAST_PAUSE if options.long_source == LONG_SOURCE_SEQUENTIAL else _LEAST_GAP)


def compression_ratio(text: str) -> float:
    """Returns the bytes of a text, divided by those after compression; repetition raises it."""
    content = text.encode()
    return len(content) / len(zlib.compress(content))


def split_start(
    start_ids: Sequence[int | None], model: ServedModel
) -> tuple[list[int], tuple[int | None, ...]]:
    """Returns the tokens of the text before a target, and the start tokens without it."""
    first = model.manifest.template.start[0]
    assert isinstance(first, int)
    num_before = list(start_ids).index(first)
    said = [token_id for token_id in start_ids[1:num_before] if token_id is not None]
    return said, tuple(start_ids[num_before:])


def text_ids(text: str, model: ServedModel, field: str, name: str) -> list[int]:
    """Returns the tokens of a text that the decoder reads before its start; raises InvalidRequest."""
    check_bytes(text, model.max_target_length, model, field, name)
    return model.target_tokenizer.encode(f" {text.strip()}")


def most_before(model: ServedModel) -> int:
    """Returns how many tokens of a text a decoder of sounds reads before its start."""
    return model.num_target_positions // 2 - 1


def after_text(
    token_ids: Sequence[int], model: ServedModel, hot_ids: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Returns what a decoder of sounds reads before its start if there is a text before.

    Args:
        token_ids: The text, of which the last tokens are read.
        model: The model.
        hot_ids: The tokens before them, of which all are read.
    """
    assert model.manifest.timestamps is not None
    rest = token_ids[max(len(token_ids) + len(hot_ids) - most_before(model), 0) :]
    return (model.manifest.timestamps.previous_id, *hot_ids, *rest)
