"""OpenAI's pages for sounds, `/v1/audio/transcriptions` and `/v1/audio/translations`, and `/v1/models`.

They are read as requests of `seq2seq.v1` that decode a sound in windows. Where they differ from OpenAI's is
said in docs/speech.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from string import digits
from typing import Any

import grpc
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from seq2seq_serve.bundle.audio import HOP, SAMPLE_RATE
from seq2seq_serve.bundle.names import SOURCE_LANGUAGE, TASK
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.languages import name_of, tag_of
from seq2seq_serve.protos.options import OPTIONS
from seq2seq_serve.protos.subtitles import FORMATS, subtitles
from seq2seq_serve.server.config import OpenAINames
from seq2seq_serve.server.errors import InvalidRequest, UnknownModel
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.call import BYTES_PER_TEXT_BYTE
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.forms import FormFields, read_form, text_of
from seq2seq_serve.server.service.read.options import Decoding
from seq2seq_serve.server.service.read.windows import most_before, text_ids
from seq2seq_serve.server.service.seq2seq.generation import generate, read_decoding
from seq2seq_serve.server.service.status import status_of

PAGES = (
    "OpenAI's pages here are /v1/audio/transcriptions, /v1/audio/translations and /v1/models, and over a "
    "WebSocket /v1/realtime"
)
MAX_FILE_BYTES = 25 * 2**20  # OpenAI's limit
_MAX_TEXT_BYTES, _MAX_SHORT_BYTES = 2**16, 2**10  # of a field of `_LONG`, and of others than the file

_ANY_MODEL = "whisper-1"  # the name of OpenAI's model, which many programs send
_JSON, _VERBOSE = "json", "verbose_json"
_ANSWERS = (_JSON, "text", _VERBOSE, *FORMATS)

_CHUNKING, _GRANULARITIES, _INCLUDE = "chunking_strategy", "timestamp_granularities", "include"
_VAD_FILTER, _WORD_TIMESTAMPS, _HOTWORDS = "vad_filter", "word_timestamps", "hotwords"  # of faster-whisper
_VOICE_ACTIVITY, _SPEAKERS = "voice_activity", "diarization"
_SWITCHES = ("stream", _VOICE_ACTIVITY, _VAD_FILTER, _WORD_TIMESTAMPS, _SPEAKERS)
_LISTS = {_GRANULARITIES: ("segment", "word"), _INCLUDE: ("logprobs",)}
_LONG = ("prompt", _HOTWORDS)
_OPTIONS = {"language": SOURCE_LANGUAGE, "prompt": "prompt", "temperature": "temperature"}
_FIELDS = (
    "file",
    "file_type",
    "model",
    *_OPTIONS,
    "response_format",
    "stream",
    f"{_GRANULARITIES}[]",
    f"{_INCLUDE}[]",
    _CHUNKING,
    _HOTWORDS,
    _VAD_FILTER,
    _WORD_TIMESTAMPS,
    _VOICE_ACTIVITY,
)
_KNOWN = {name.removesuffix("[]") for name in _FIELDS} | {_SPEAKERS}
_REFUSED = ("known_speaker_names", "known_speaker_references")
_NO_SPEAKERS = "the server does not tell speakers apart: leave {} out"
# How programs write that a field does not have a value
_ABSENT = (b"", b"null", b"None", b"undefined")
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}
_DETECTED = "auto"  # the language, in programs for whisper.cpp
_WORD = re.compile(r"""\w+|(?<!\w)(['"]).*?\1""")  # of an error, or a value in it
_NAME = re.compile(r"(\w+)(?:\[(\w*)\])?")  # of a field, an element of a list, or a member

# The numbers in `chunking_strategy`: the bound of each, the setting of `SpeechRules`, and its unit
_SERVER_VAD = "server_vad"
_VAD_NUMBERS = {
    "threshold": (1, "probability", 1.0),
    "prefix_padding_ms": (5_000, "margin_seconds", 1e-3),
    "silence_duration_ms": (60_000, "least_pause_seconds", 1e-3),
}

WriteBytes = Callable[[bytes], Awaitable[None]]


@dataclass
class _Fields:
    """The fields of a form that have a value, by their names without brackets.

    Attributes:
        texts: The text of each that has one.
        lists: The elements of each list.
        chunking: The members of `chunking_strategy` as an object; None if it is not sent.
        names: The name with which each was sent.
    """

    texts: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    chunking: dict[str, Any] | None = None
    names: dict[str, str] = field(default_factory=dict)

    def is_on(self, name: str) -> bool:
        """Whether a switch is on."""
        return _TRUTHS[self.texts.get(name, "false").lower()]


async def transcribe(
    form: FormFields, task: str, call: RemoteCall, write: WriteBytes, names: OpenAINames
) -> Response | None:
    """Returns the answer to a form with a sound; None after it has written the events of a stream.

    Args:
        form: The form.
        task: The model's task: "transcribe", or "translate" into English.
        call: The call that it came with.
        write: Sends an event of a stream, as JSON.
        names: Which names of models are known.

    Raises:
        ServerError: The request is refused or fails.
    """
    files = form.pop("file", [])
    fields = _fields(form)
    if len(files) != 1 or not files[0]:
        raise InvalidRequest("the file is missing or empty, or there are several: send one", field="file")
    _check(fields)
    form_of_answer = fields.texts.get("response_format", _JSON)
    with _named_as_sent(fields.names):
        name = named_model(fields.texts.get("model", ""), call, names)
        async with call.calls.models.use(call, name) as model:
            check_model(model, task, call)
            decoding = await _decoding(fields, task, model, call)
            sources = [pb.Source(file=files.pop(), file_type=fields.texts.get("file_type", ""))]
            del form
            warning = _warning(decoding)
            if fields.is_on("stream"):
                await _stream(partial(generate, [sources], decoding, call), decoding, warning, call, write)
                return None
            [answer] = await generate([sources], decoding, call)
            response = await call.build(
                answer.ByteSize(), lambda _: _response(answer, form_of_answer, task, decoding)
            )
            if warning:
                response.headers["Warning"] = f'299 - "{warning}"'
            return response


def models(call: RemoteCall) -> Response:
    """Returns the list of the served models that the caller may use."""
    return JSONResponse(
        {"object": "list", "data": [_model(model.name) for model in call.calls.models.seen_by(call.caller)]}
    )


async def model(name: str, call: RemoteCall) -> Response:
    """Returns one of the served models; raises UnknownModel."""
    async with call.calls.models.use(call, name, loads=False) as model:
        return JSONResponse(_model(model.name))


async def form_of(request: Request, body: bytes, call: RemoteCall) -> FormFields:
    """Returns the fields of a form; raises InvalidRequest as `read_form`."""
    content_type = request.headers.get("content-type", "")
    return await call.read(lambda _: read_form(body, content_type), len(body) // BYTES_PER_TEXT_BYTE)


def error_content(error: Exception) -> dict[str, Any]:
    """Returns the body of a refusal, which OpenAI's clients turn into their exceptions."""
    code, text, reason, field = status_of(error)
    is_ours = code in (
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    kind = "server_error" if is_ours else "invalid_request_error"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        kind = "rate_limit_error"
    return {"error": {"message": text, "type": kind, "param": field or None, "code": reason}}


def refusal_content(text: str, _code: str, reason: str) -> dict[str, Any]:
    """Returns the body of a refusal of a request that reaches no page."""
    return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": reason}}


def _fields(form: FormFields) -> _Fields:
    """Returns the fields of a form that have a value.

    Elements of a list are sent as `include[]`, `include[0]` or `include`, or as a JSON list; members of an
    object as `chunking_strategy[type]`, or all of them as JSON.

    Raises:
        InvalidRequest: A field is unknown, too long, not a text, or sent twice.
    """
    fields = _Fields()
    for sent, values in form.items():
        values = [value for value in values if len(value) > _MAX_SHORT_BYTES or value.strip() not in _ABSENT]
        if not values:
            continue
        found = _NAME.fullmatch(sent)
        base, member = (found[1], found[2]) if found else (sent, None)
        _check_name(sent, base, member)
        fields.names.setdefault(base, sent)
        texts = _texts(sent, base, values)
        if base in _LISTS:
            fields.lists.setdefault(base, []).extend(one for text in texts for one in _elements(text, sent))
        elif len(texts) > 1:
            raise InvalidRequest(f"{sent} is sent {len(texts)} times: send it once", field=sent)
        elif base == _CHUNKING:
            members = {member: texts[0]} if member else _object(texts[0], sent)
            if "type" in members:
                fields.names[base] = sent
            fields.chunking = (fields.chunking or {}) | members
        else:
            fields.texts[base] = texts[0] if base in _LONG else texts[0].strip()
    if fields.texts.get("language", "").lower() == _DETECTED:
        del fields.texts["language"]
    if "language" in fields.texts:
        fields.texts["language"] = tag_of(fields.texts["language"])
    return fields


def _check_name(sent: str, base: str, member: str | None) -> None:
    """Refuses a field that there is not, and what tells speakers apart."""
    if base in _REFUSED:
        raise InvalidRequest(_NO_SPEAKERS.format(base), field=sent[:100])
    is_plain = member is None or base == _CHUNKING or (base in _LISTS and not member.strip(digits))
    if base not in _KNOWN or not is_plain:
        raise InvalidRequest(f"there is no field {sent[:100]!r}: send {', '.join(_FIELDS)}", field=sent[:100])


def _texts(sent: str, base: str, values: list[bytes]) -> list[str]:
    """Returns the texts of a field; raises InvalidRequest if one is too long."""
    most, length = _MAX_TEXT_BYTES if base in _LONG else _MAX_SHORT_BYTES, max(map(len, values))
    if length > most:
        raise InvalidRequest(f"{base} has {length} bytes: send at most {most}", field=sent[:100])
    return [text_of(value, sent) for value in values]


def _elements(text: str, name: str) -> list[str]:
    """Returns the elements of a list that are sent as one text."""
    if not text.lstrip().startswith("["):
        return [text.strip()]
    elements = _from_json(text, name)
    if not isinstance(elements, list) or not all(isinstance(one, str) for one in elements):
        raise InvalidRequest(f"{name} is {text[:100]!r}, and must be a list of texts", field=name)
    return elements


def _object(text: str, name: str) -> dict[str, Any]:
    """Returns `chunking_strategy` as an object, which may be its type alone."""
    if not text.lstrip().startswith("{"):
        return {"type": text.strip()}
    members: dict[str, Any] = _from_json(text, name)
    return {member: value for member, value in members.items() if value is not None}


def _from_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{name} is {text[:100]!r}, and is not JSON", field=name) from None


def _check(fields: _Fields) -> None:
    """Refuses values that do not fit, or do not go with each other."""
    texts, names, lists = fields.texts, fields.names, fields.lists
    for name in _SWITCHES:
        if texts.get(name, "false").lower() not in _TRUTHS:
            raise InvalidRequest(
                f"{name} is {texts[name][:100]!r}, and must be true or false", field=names[name]
            )
    for name, known in _LISTS.items():
        if wrong := [value for value in lists.get(name, ()) if value not in known]:
            raise InvalidRequest(
                f"{names[name]} is {wrong[0][:100]!r}, and must be {' or '.join(known)}", field=names[name]
            )
    form = texts.get("response_format", _JSON)
    if form not in _ANSWERS:
        raise InvalidRequest(
            f"response_format is {form[:100]!r}, and must be one of {', '.join(_ANSWERS)}",
            field="response_format",
        )
    if fields.is_on("stream") and form != _JSON:
        raise InvalidRequest(
            f"a stream has events in JSON, and response_format is {form}: leave one of them out",
            field="response_format",
        )
    if fields.is_on(_SPEAKERS):
        raise InvalidRequest(_NO_SPEAKERS.format(_SPEAKERS), field=_SPEAKERS)
    if _has_words(fields) and form not in (_VERBOSE, *FORMATS):
        raise InvalidRequest(
            f"the times of words need the response_format {_VERBOSE} or {' or '.join(FORMATS)}",
            field=names.get(_GRANULARITIES, _WORD_TIMESTAMPS),
        )
    if _INCLUDE in lists and form != _JSON:
        raise InvalidRequest("logprobs need the response_format json", field=names[_INCLUDE])


def _has_words(fields: _Fields) -> bool:
    return "word" in fields.lists.get(_GRANULARITIES, ()) or fields.is_on(_WORD_TIMESTAMPS)


def _speech_settings(fields: _Fields) -> dict[str, float]:
    """Returns the settings of `SpeechRules` that `chunking_strategy` has; raises InvalidRequest."""
    settings = {}
    for member, value in (fields.chunking or {}).items():
        name = f"{_CHUNKING}[{member[:100]}]"
        if member == "type":
            if value not in ("auto", _SERVER_VAD):
                raise InvalidRequest(
                    f"{_CHUNKING} is {str(value)[:100]!r}, and must be auto or {_SERVER_VAD}",
                    field=fields.names[_CHUNKING],
                )
            continue
        if member not in _VAD_NUMBERS:
            raise InvalidRequest(
                f"there is no field {name!r}: send type, {', '.join(_VAD_NUMBERS)}", field=name
            )
        most, setting, unit = _VAD_NUMBERS[member]
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = -1
        if not 0 <= number <= most:
            raise InvalidRequest(
                f"{name} is {str(value)[:100]!r}, and must be a number from 0 to {most}", field=name
            )
        settings[setting] = number * unit
    return settings


@contextmanager
def _named_as_sent(names: Mapping[str, str]) -> Iterator[None]:
    """Makes errors name the fields of a form in place of our own, in their texts, too."""
    activity = next((names[one] for one in (_CHUNKING, _VAD_FILTER) if one in names), _VOICE_ACTIVITY)
    words = names.get(_GRANULARITIES, _WORD_TIMESTAMPS)
    ours = {
        **{option: name for name, option in _OPTIONS.items()},
        "voice_activity": activity,
        "long_source": _CHUNKING,
        "timestamps": words,
        "word_timestamps": words,
        "log_probabilities": names.get(_INCLUDE, _INCLUDE),
        "file_type": "file_type",
    }
    try:
        yield
    except InvalidRequest as error:
        place, _, name = error.field.partition(".")
        if place == "options" or place.startswith("sources["):
            error.field = ours.get(name, "file")
            error.args = (_WORD.sub(lambda found: ours.get(found[0], found[0]), str(error)),)
        raise


def named_model(name: str, call: RemoteCall, names: OpenAINames) -> str:
    """Returns the name of the model to use.

    Without a name, and with any name if the server takes it, that is the only model that reads sounds; with
    the name of OpenAI's own model it is the first of them. Adapters count only for callers who may not use
    any model without one.
    """
    models = call.calls.models
    if models.get(name) is not None or models.get(name.rpartition("/")[0]) is not None:
        return name
    found = [model for model in models.open_to(call.caller) if model.reads_sound]
    hearing = [model.name for model in [one for one in found if one.base is None] or found]
    takes_any = not name or names is OpenAINames.ANY
    if hearing and (name == _ANY_MODEL or (takes_any and len(hearing) == 1)):
        return hearing[0]
    if name == _ANY_MODEL or (takes_any and not hearing):
        raise UnknownModel("no model here reads sounds", name=name, version="")
    return name


def check_model(model: ServedModel, task: str, call: RemoteCall) -> None:
    """Raises InvalidRequest if a model does not do a task with sounds."""
    if not model.reads_sound or model.manifest.timestamps is None:
        seen = call.calls.models.seen_by(call.caller)
        hearing = [one.name for one in seen if one.reads_sound and one.manifest.timestamps]
        raise InvalidRequest(
            f"{model.name} does not transcribe sounds: choose {', '.join(hearing) or 'another server'}",
            field="model",
        )
    if task != "transcribe" and TASK not in model.manifest.choices:
        raise InvalidRequest(
            f"{model.name} does not translate: choose another model, or send the sound to "
            "/v1/audio/transcriptions",
            field="model",
        )


async def _decoding(fields: _Fields, task: str, model: ServedModel, call: RemoteCall) -> Decoding:
    """Returns how the sound is decoded.

    Raises:
        ServerError: As `read_decoding`.
    """
    settings, options = _speech_settings(fields), pb.GenerateOptions(long_source=pb.LONG_SOURCE_SEQUENTIAL)
    if fields.chunking is not None:
        options = pb.GenerateOptions(long_source=pb.LONG_SOURCE_SPLIT, timestamps=True, voice_activity=True)
    options.voice_activity |= fields.is_on(_VOICE_ACTIVITY) or fields.is_on(_VAD_FILTER)
    options.word_timestamps = _has_words(fields)
    options.log_probabilities = _INCLUDE in fields.lists
    if TASK in model.manifest.choices:
        options.task = task
    for name, option in _OPTIONS.items():
        if name in fields.texts:
            try:
                options.MergeFrom(OPTIONS[option].read(fields.texts[name], is_text=True))
            except ValueError as error:
                raise InvalidRequest(
                    f"{name} is {fields.texts[name][:100]!r}, and {error}", field=name
                ) from None
    decoding = await read_decoding(options, model, call, stream=fields.is_on("stream"))
    assert decoding.windows is not None
    windows = replace(decoding.windows, always_listens=fields.texts.get("response_format") == _VERBOSE)
    if words := fields.texts.get(_HOTWORDS):
        hot_ids = await call.read(lambda _: _hot_ids(words, model), len(words.encode()))
        windows = replace(windows, hot_ids=hot_ids)
    speech = replace(decoding.speech, **settings) if decoding.speech and settings else decoding.speech
    return replace(decoding, windows=windows, speech=speech)


def _hot_ids(words: str, model: ServedModel) -> tuple[int, ...]:
    token_ids = text_ids(words, model, _HOTWORDS, _HOTWORDS)
    if len(token_ids) > (most := most_before(model)):
        raise InvalidRequest(
            f"{_HOTWORDS} has {len(token_ids)} tokens, and {model.name} reads at most {most}: send fewer",
            field=_HOTWORDS,
        )
    return tuple(token_ids)


def _warning(decoding: Decoding) -> str:
    """Returns what the caller should know of a prompt that is too long; empty for others."""
    assert decoding.windows is not None
    room = most_before(decoding.model) - len(decoding.windows.hot_ids)
    if decoding.num_prompt <= room:
        return ""
    return f"the prompt has {decoding.num_prompt} tokens, of which the model reads the last {room}"


async def _stream(
    generate: Callable[..., Awaitable[list[pb.GenerateResponse]]],
    decoding: Decoding,
    warning: str,
    call: RemoteCall,
    write: WriteBytes,
) -> None:
    async def write_piece(piece: pb.Piece) -> None:
        if piece.text:
            await write(_dumped({"type": "transcript.text.delta", "delta": piece.text}))

    [answer] = await generate(write_piece)
    done = {"type": "transcript.text.done"}
    if warning:
        done["warning"] = warning
    await write(await call.build(answer.ByteSize(), lambda _: _dumped(done | _content(answer, decoding))))


def _dumped(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()


def _content(answer: pb.GenerateResponse, decoding: Decoding) -> dict[str, Any]:
    content: dict[str, Any] = {"text": answer.hypotheses[0].text.strip()}
    if decoding.options.log_probabilities:
        content["logprobs"] = _logprobs(answer, decoding.model)
    return content | {"usage": {"type": "duration", "seconds": answer.usage.source_seconds}}


def _logprobs(answer: pb.GenerateResponse, model: ServedModel) -> list[dict[str, Any]]:
    """Returns the tokens of the text. Those of times, and the ends of windows, are not in it."""
    times, stream = model.manifest.timestamps, model.target_tokenizer.stream()
    assert times is not None
    logprobs = []
    for part in answer.sentences or [answer]:
        best = part.hypotheses[0]
        for token_id, one in zip(best.token_ids, best.log_probabilities, strict=False):
            if not times.has(token_id):
                octets = stream.bytes_of([token_id])
                token = octets.decode(errors="replace")
                logprobs.append({"token": token, "logprob": one, "bytes": list(octets)})
    return logprobs


def _response(answer: pb.GenerateResponse, form: str, task: str, decoding: Decoding) -> Response:
    hypothesis, options = answer.hypotheses[0], decoding.options
    if form in FORMATS:
        return PlainTextResponse(subtitles(hypothesis.segments, form))
    if form == "text":
        return PlainTextResponse(f"{hypothesis.text.strip()}\n")
    content = _content(answer, decoding)
    if form == _VERBOSE:
        language = answer.detected_language or options.source_language or decoding.model.only_language
        content |= {
            "task": task,
            "language": name_of(language).casefold(),
            "duration": answer.usage.source_seconds,
            "segments": [_segment(place, segment) for place, segment in enumerate(hypothesis.segments)],
        }
        if options.word_timestamps:
            content["words"] = [_word(word) for segment in hypothesis.segments for word in segment.words]
    return JSONResponse(content)


def _segment(place: int, segment: pb.Segment) -> dict[str, Any]:
    window = segment.window
    return {
        "id": place,
        "seek": round(window.begin_seconds * SAMPLE_RATE / HOP),
        "start": segment.begin_seconds,
        "end": segment.end_seconds,
        "text": segment.text,
        "tokens": list(segment.token_ids),
        "temperature": round(window.temperature, 6),
        "avg_logprob": window.mean_log_probability,
        "compression_ratio": window.compression_ratio,
        "no_speech_prob": window.no_speech_probability,
    }


def _word(word: pb.Word) -> dict[str, Any]:
    return {"word": word.text.strip(), "start": word.begin_seconds, "end": word.end_seconds}


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "seq2seq-serve"}
