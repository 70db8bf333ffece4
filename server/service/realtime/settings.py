"""The settings of a session, in OpenAI's two forms: the present one, and that of `transcription_session`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from seq2seq_serve.bundle.names import TASK
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.languages import tag_of
from seq2seq_serve.protos.options import OPTIONS
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel

# The second one, which looks at the text, is taken for the first.
_SERVER_VAD, _SEMANTIC_VAD = "server_vad", "semantic_vad"
_PCM = "audio/pcm"
_RATE, _TELEPHONE_RATE = 24_000, 8_000
_ENCODINGS = {
    _PCM: pb.SOUND_ENCODING_PCM_S16,
    "audio/pcmu": pb.SOUND_ENCODING_MULAW,
    "audio/pcma": pb.SOUND_ENCODING_ALAW,
}
_OLDER_FORMATS = {"pcm16": _PCM, "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
_MAX_TEXT = 2**16  # characters of a prompt, and fewer of others
_MAX_SHORT_TEXT = 2**10
_VAD_BOUNDS = {"threshold": (0, 1), "prefix_padding_ms": (0, 5_000), "silence_duration_ms": (100, 10_000)}
# Fields of OpenAI's clients that change nothing: the server describes a session without them.
_WITHOUT_EFFECT = {
    *("include", "modalities", "client_secret", "noise_reduction", "input_audio_noise_reduction"),
    *("delay", "keywords", "languages", "eagerness"),
    *("create_response", "interrupt_response", "idle_timeout_ms"),
}
_DETECTED = "auto"  # the language, as for files
# The fields of OpenAI's forms, by those of `TranscribeStart` that errors name
_FIELDS = {
    "options.source_language": "language",
    "options.prompt": "prompt",
    "start.model": "model",
    "start.sample_rate": "rate",
    "start.turn_detection": "turn_detection",
}
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Settings:
    """The model, the language and the turn detection of a session.

    Attributes:
        model: The name that the caller gives it; empty for none.
        language: Its tag; empty if it is detected.
        prompt: Text before the sound.
        encoding: The media type of the samples.
        rate: Samples a second.
        detects_turns: Whether pauses end items; otherwise the caller commits them.
        threshold: The probability at which speech begins.
        prefix_padding_ms: The sound before speech that belongs to it.
        silence_duration_ms: The pause that ends an item.
    """

    model: str = ""
    language: str = ""
    prompt: str = ""
    encoding: str = _PCM
    rate: int = _RATE
    detects_turns: bool = True
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500

    @property
    def bytes_per_second(self) -> int:
        """The length of a second of sound."""
        return self.rate * (2 if self.encoding == _PCM else 1)

    def updated(self, session: object) -> Settings:
        """Returns these settings with the changes of an event, whose other fields stay as they are.

        Args:
            session: The event's field `session`, in either form.

        Raises:
            InvalidRequest: A field is unknown, or has a value that does not fit.
        """
        older = _Fields(session, "session")
        older.word("type", ["transcription"])
        changed = self._with_sound(older, "input_audio_")
        if (audio := older.nested("audio")) is not None:
            if (newer := audio.nested("input")) is not None:
                changed = changed._with_sound(newer, "")
                newer.end()
            audio.end()
        older.end()
        return changed

    def start(self, model: ServedModel) -> pb.TranscribeStart:
        """Returns what a stream begins with."""
        options = pb.GenerateOptions(prompt=self.prompt) if self.prompt else pb.GenerateOptions()
        if self.language.lower() not in ("", _DETECTED):
            options.MergeFrom(OPTIONS["source_language"].read(tag_of(self.language), is_text=True))
        if TASK in model.manifest.choices:
            options.task = "transcribe"
        if not self.detects_turns:
            turns = pb.TurnDetection(off=True)
        else:
            turns = pb.TurnDetection(
                threshold=self.threshold,
                prefix_padding_seconds=self.prefix_padding_ms / 1000,
                silence_seconds=self.silence_duration_ms / 1000,
            )
        return pb.TranscribeStart(
            model=model.name,
            options=options,
            encoding=_ENCODINGS[self.encoding],
            sample_rate=self.rate,
            turn_detection=turns,
        )

    def content(self, session_id: str) -> dict[str, Any]:
        """Returns the session as OpenAI describes it."""
        sound: dict[str, Any] = {"type": self.encoding}
        if self.encoding == _PCM:
            sound["rate"] = self.rate
        return {
            "type": "transcription",
            "object": "realtime.transcription_session",
            "id": session_id,
            "audio": {
                "input": {
                    "format": sound,
                    "transcription": self._transcription,
                    "noise_reduction": None,
                    "turn_detection": self._turn_detection,
                }
            },
            "include": None,
        }

    def older_content(self, session_id: str) -> dict[str, Any]:
        """Returns the session as the API described it before."""
        older = next(name for name, encoding in _OLDER_FORMATS.items() if encoding == self.encoding)
        return {
            "object": "realtime.transcription_session",
            "id": session_id,
            "input_audio_format": older,
            "input_audio_transcription": self._transcription,
            "input_audio_noise_reduction": None,
            "turn_detection": self._turn_detection,
            "include": None,
        }

    @property
    def _transcription(self) -> dict[str, Any]:
        return {
            "model": self.model or None,
            "language": self.language or None,
            "prompt": self.prompt,
        }

    @property
    def _turn_detection(self) -> dict[str, Any] | None:
        if not self.detects_turns:
            return None
        return {"type": _SERVER_VAD, **{name: getattr(self, name) for name in _VAD_BOUNDS}}

    def _with_sound(self, fields: _Fields, prefix: str) -> Settings:
        """Returns these settings with the changes of fields, some of which have a prefix in their names."""
        changed = self
        if prefix and (older := fields.word(f"{prefix}format", list(_OLDER_FORMATS))) is not None:
            changed = changed._with_encoding(_OLDER_FORMATS[older], None)
        if not prefix and (sound := fields.nested("format")) is not None:
            encoding = sound.word("type", list(_ENCODINGS)) or changed.encoding
            changed = changed._with_encoding(encoding, sound.number("rate", 1, 10**6))
            sound.end()
        if (transcription := fields.nested(f"{prefix}transcription")) is not None:
            changed = changed._with_transcription(transcription)
        if (detection := fields.nested("turn_detection", null=fields)) is fields:
            changed = replace(changed, detects_turns=False)
        elif detection is not None:
            changed = changed._with_turns(detection)
        return changed

    def _with_encoding(self, encoding: str, rate: float | None) -> Settings:
        default = _RATE if encoding == _PCM else _TELEPHONE_RATE
        return replace(self, encoding=encoding, rate=int(rate or default))

    def _with_transcription(self, fields: _Fields) -> Settings:
        lengths = {"model": _MAX_SHORT_TEXT, "language": _MAX_SHORT_TEXT, "prompt": _MAX_TEXT}
        given = {name: fields.text(name, most) for name, most in lengths.items()}
        fields.end()
        return replace(self, **{name: text for name, text in given.items() if text is not None})  # type: ignore[arg-type]

    def _with_turns(self, fields: _Fields) -> Settings:
        fields.word("type", [_SERVER_VAD, _SEMANTIC_VAD])
        numbers = {name: fields.number(name, *bounds) for name, bounds in _VAD_BOUNDS.items()}
        fields.end()
        given = {name: number for name, number in numbers.items() if number is not None}
        return replace(self, detects_turns=True, **given)  # type: ignore[arg-type]


@contextmanager
def named_as_sent() -> Iterator[None]:
    """Makes errors name OpenAI's fields in place of those of `TranscribeStart`, also in their texts."""
    try:
        yield
    except InvalidRequest as error:
        error.field = _FIELDS.get(error.field, error.field)
        words = {name.rpartition(".")[2]: sent for name, sent in _FIELDS.items()}
        error.args = (_WORD.sub(lambda found: words.get(found[0], found[0]), str(error)),)
        raise


class _Fields:
    """The fields of an object that are not read yet.

    Args:
        content: The object, as JSON has it.
        path: Where it is in the event.

    Raises:
        InvalidRequest: It is not an object.
    """

    def __init__(self, content: object, path: str) -> None:
        if not isinstance(content, dict):
            raise InvalidRequest(f"{path} must be an object", field=path)
        self._content = {name: value for name, value in content.items() if name not in _WITHOUT_EFFECT}
        self._path = path

    def nested(self, name: str, null: _Fields | None = None) -> _Fields | None:
        """Returns the fields of a field; None if it is not given, and `null` if it is null."""
        if name not in self._content:
            return None
        value = self._content.pop(name)
        return null if value is None else _Fields(value, f"{self._path}.{name}")

    def text(self, name: str, most: int) -> str | None:
        """Returns a text, empty for null; None if it is not given."""
        if name not in self._content:
            return None
        value = self._content.pop(name)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > most:
            self._refuse(name, f"must be a text of at most {most} characters")
        return value

    def word(self, name: str, known: list[str]) -> str | None:
        """Returns one of the known words; None if it is not given, or null."""
        value = self._content.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, str) or value not in known:
            self._refuse(name, f"is {str(value)[:100]!r}, and must be {' or '.join(known)}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """Returns a number in its range; None if it is not given, or null."""
        value = self._content.pop(name, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            self._refuse(name, f"is {str(value)[:100]!r}, and must be a number from {least} to {most}")
        return value

    def end(self) -> None:
        """Refuses the fields that nobody has read."""
        if self._content:
            self._refuse(
                next(iter(self._content))[:100], "is not a field that this server knows: leave it out"
            )

    def _refuse(self, name: str, problem: str) -> NoReturn:
        path = f"{self._path}.{name}"
        raise InvalidRequest(f"{path} {problem}", field=path)
