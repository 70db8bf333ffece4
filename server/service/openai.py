"""OpenAI's pages for sounds, `/v1/audio/transcriptions` and `/v1/audio/translations`, and `/v1/models`.

They are read as requests of `seq2seq.v1` that decode a sound in windows. Where they differ from OpenAI's is
said in docs/speech.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from seq2seq_serve.bundle.audio import HOP, SAMPLE_RATE
from seq2seq_serve.bundle.names import SOURCE_LANGUAGE, TASK
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.options import OPTIONS
from seq2seq_serve.protos.subtitles import FORMATS, subtitles
from seq2seq_serve.server.errors import InvalidRequest, UnknownModel
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.call import BYTES_PER_TEXT_BYTE
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.forms import Form, read_form, text_of
from seq2seq_serve.server.service.read.languages import name_of
from seq2seq_serve.server.service.seq2seq.generation import generate, read_decoding
from seq2seq_serve.server.service.status import status_of

PAGES = "OpenAI's pages here are /v1/audio/transcriptions, /v1/audio/translations and /v1/models"
MAX_FILE_BYTES = 25 * 2**20  # OpenAI's limit
_MAX_TEXT_BYTES = 2**16  # of a field other than the file

_ANY_MODEL = "whisper-1"  # the name of OpenAI's model, which many programs send
_FORMATS = ("json", "text", "verbose_json", *FORMATS)
_OPTIONS = {
    "language": SOURCE_LANGUAGE,
    "prompt": "prompt",
    "temperature": "temperature",
    "voice_activity": "voice_activity",
}
_CHUNKING = "chunking_strategy"
_GRANULARITIES = "timestamp_granularities[]"
_FIELDS = ("file", "model", "response_format", "stream", _GRANULARITIES, _CHUNKING, *_OPTIONS)

Write = Callable[[dict[str, Any]], Awaitable[None]]


async def transcribe(form: Form, task: str, call: RemoteCall, write: Write) -> Response | None:
    """Returns the answer to a form with a sound; None after it has written the events of a stream.

    Args:
        form: The form.
        task: The model's task: "transcribe", or "translate" into English.
        call: The call that it came with.
        write: Sends an event of a stream.

    Raises:
        ServerError: The request is refused or fails.
    """
    unknown = [name for name in form if name not in _FIELDS]
    if unknown:
        raise InvalidRequest(
            f"there is no field {unknown[0][:100]!r}: send {', '.join(_FIELDS)}", field=unknown[0][:100]
        )
    content = form.pop("file", [b""])[-1]
    granularities = form.pop(_GRANULARITIES, [])
    for name, values in form.items():
        if len(values[-1]) > _MAX_TEXT_BYTES:
            raise InvalidRequest(
                f"{name} has {len(values[-1])} bytes: send at most {_MAX_TEXT_BYTES}", field=name
            )
    texts = {name: text_of(values[-1], name) for name, values in form.items()}
    if not content:
        raise InvalidRequest("the file is missing or empty", field="file")
    form_of_answer = texts.get("response_format") or "json"
    if form_of_answer not in _FORMATS:
        raise InvalidRequest(
            f"response_format is {form_of_answer[:100]!r}, and must be one of {', '.join(_FORMATS)}",
            field="response_format",
        )
    if texts.get("stream", "false") not in ("false", "true"):
        raise InvalidRequest(
            f"stream is {texts['stream'][:100]!r}, and must be false or true", field="stream"
        )
    if wrong := [value for value in granularities if value not in (b"segment", b"word")]:
        raise InvalidRequest(
            f"{_GRANULARITIES} is {wrong[0][:100].decode(errors='replace')!r}, and must be segment or word",
            field=_GRANULARITIES,
        )
    has_words = b"word" in granularities
    if has_words and form_of_answer not in ("verbose_json", *FORMATS):
        raise InvalidRequest(
            f"the times of words need the response_format verbose_json or {' or '.join(FORMATS)}",
            field=_GRANULARITIES,
        )
    if texts.get(_CHUNKING, "auto") != "auto":
        raise InvalidRequest(f"{_CHUNKING} is {texts[_CHUNKING][:100]!r}, and must be auto", field=_CHUNKING)
    with call.calls.models.use(call, _named(texts.get("model", ""), call)) as model:
        options = _options(texts, task, model)
        options.word_timestamps = has_words
        is_streamed = texts.get("stream") == "true"
        decoding = await read_decoding(options, model, call, stream=is_streamed)
        if form_of_answer == "verbose_json":
            assert decoding.windows is not None
            decoding = replace(decoding, windows=replace(decoding.windows, always_listens=True))
        sources = [pb.Source(file=content)]
        del content, form
        if is_streamed:
            await _stream(partial(generate, [sources], decoding, call), write)
            return None
        [answer] = await generate([sources], decoding, call)
        return await call.build(answer.ByteSize(), lambda _: _response(answer, form_of_answer, task, options))


def models(call: RemoteCall) -> Response:
    """Returns the list of the served models."""
    return JSONResponse({"object": "list", "data": [_model(model.name) for model in call.calls.models]})


def model(name: str, call: RemoteCall) -> Response:
    """Returns one of the served models; raises UnknownModel."""
    with call.calls.models.use(call, name) as model:
        return JSONResponse(_model(model.name))


async def form_of(request: Request, body: bytes, call: RemoteCall) -> Form:
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
    return {"error": {"message": text, "type": kind, "param": field, "code": reason}}


def refusal_content(text: str, _code: str, reason: str) -> dict[str, Any]:
    """Returns the body of a refusal of a request that reaches no page."""
    return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": reason}}


def _named(name: str, call: RemoteCall) -> str:
    """Returns the name of the model to use: for OpenAI's own name the first that reads sounds."""
    served = list(call.calls.models)
    if name != _ANY_MODEL or any(model.name == name for model in served):
        return name
    hearing = [model.name for model in served if model.reads_sound]
    if not hearing:
        raise UnknownModel("no model here reads sounds", name=name, version="")
    return hearing[0]


def _options(texts: dict[str, str], task: str, model: ServedModel) -> pb.GenerateOptions:
    options = pb.GenerateOptions(long_source=pb.LONG_SOURCE_SEQUENTIAL)
    if _CHUNKING in texts:
        options = pb.GenerateOptions(long_source=pb.LONG_SOURCE_SPLIT, timestamps=True, voice_activity=True)
    if TASK in model.manifest.choices or task != "transcribe":
        options.task = task
    for field, name in _OPTIONS.items():
        if texts.get(field):
            try:
                options.MergeFrom(OPTIONS[name].read(texts[field], is_text=True))
            except ValueError as error:
                raise InvalidRequest(f"{field} is {texts[field][:100]!r}, and {error}", field=field) from None
    return options


async def _stream(generate: Callable[..., Awaitable[list[pb.GenerateResponse]]], write: Write) -> None:
    async def write_piece(piece: pb.Piece) -> None:
        if piece.text:
            await write({"type": "transcript.text.delta", "delta": piece.text})

    [answer] = await generate(write_piece)
    done = {
        "type": "transcript.text.done",
        "text": answer.hypotheses[0].text.strip(),
        "usage": _usage(answer),
    }
    await write(done)


def _response(answer: pb.GenerateResponse, form: str, task: str, options: pb.GenerateOptions) -> Response:
    hypothesis = answer.hypotheses[0]
    text = hypothesis.text.strip()
    if form in FORMATS:
        return PlainTextResponse(subtitles(hypothesis.segments, form))
    if form == "text":
        return PlainTextResponse(f"{text}\n")
    content: dict[str, Any] = {"text": text, "usage": _usage(answer)}
    if form == "verbose_json":
        content |= {
            "task": task,
            "language": name_of(answer.detected_language or options.source_language).casefold(),
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


def _usage(answer: pb.GenerateResponse) -> dict[str, Any]:
    return {"type": "duration", "seconds": answer.usage.source_seconds}


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "seq2seq-serve"}
