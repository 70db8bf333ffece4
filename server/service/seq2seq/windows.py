"""Decodes a long sound in windows, each as a request of its own to the engine: in a row, or all at once.

The rules are Whisper's (Radford et al. 2022, arXiv:2212.04356, section 4.5). If the text of a window repeats
itself, or the model is not sure of it, the window is decoded once more at a higher temperature. A window
in which nobody speaks gets no text. The option `sequential` begins each window at the last timestamp of the
window before it, and gives the decoder the text up to there.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from seq2seq_serve.bundle.audio import HOP, SAMPLE_RATE, times_in_sound
from seq2seq_serve.bundle.manifest import Timestamps
from seq2seq_serve.protos.seq2seq_v1_pb2 import LONG_SOURCE_SEQUENTIAL, Window
from seq2seq_serve.server.engine.request import Array, Request, Sampling
from seq2seq_serve.server.engine.result import FinishReason, Result
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.read.options import Decoding
from seq2seq_serve.server.service.read.sources import Reading
from seq2seq_serve.server.service.read.windows import WindowRules, after_text, compression_ratio, split_start

# Decodes a request; the second argument says whether another one had the same source before.
Decode = Callable[[Request, bool], Awaitable[Result]]

MOST_PIECES_AT_ONCE = 16  # of a sound that is split; their results wait for those before them
_MOST_TRUSTED = 0.5  # the highest temperature of a text that the next window is decoded with
# A window begins at least this part of its length after the one before; for Whisper a second.
_LEAST_SHARE = 30


class Decoded(NamedTuple):
    """What was decoded for a window.

    Attributes:
        is_silent: Whether nobody speaks, by the rules.
        is_trusted: Whether the next window may be decoded with its text.
    """

    result: Result
    window: Window
    is_silent: bool
    is_trusted: bool


def decode_windows(
    readings: Sequence[Reading], decoding: Decoding, decode: Decode
) -> AsyncGenerator[tuple[Reading, Result]]:
    """Yields each window of a sound, and its result.

    Args:
        readings: The windows of a sound that is split, or the whole sound.
        decoding: How its windows are decoded.
        decode: Decodes a request.

    Raises:
        ServerError: `decode` raises it.
    """
    if decoding.options.long_source == LONG_SOURCE_SEQUENTIAL:
        return decode_in_a_row(readings[0], decoding, decode)
    return _decode_at_once(readings, decoding, decode)


async def _decode_at_once(
    pieces: Sequence[Reading], decoding: Decoding, decode: Decode
) -> AsyncGenerator[tuple[Reading, Result]]:
    async def decoded(piece: Reading) -> list[tuple[Reading, Result]]:
        return [pair async for pair in decode_in_a_row(piece, decoding, decode)]

    waiting = deque(pieces)
    tasks: list[asyncio.Task[list[tuple[Reading, Result]]]] = []
    try:
        while waiting or tasks:
            while waiting and len(tasks) < MOST_PIECES_AT_ONCE:
                tasks.append(asyncio.create_task(decoded(waiting.popleft())))
            pairs = await tasks[0]
            del tasks[0]  # its results have the attention
            while pairs:
                yield pairs.pop(0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def decode_in_a_row(
    whole: Reading, decoding: Decoding, decode: Decode
) -> AsyncGenerator[tuple[Reading, Result]]:
    """Yields the results without the tokens that the next window repeats.

    Args:
        whole: A sound, or a piece of one that is split: its first window has all of it, and the next ones
            begin where the model ended its last segment, even if it says that nobody speaks after it.
        decoding: How its windows are decoded.
        decode: Decodes a request.
    """
    model, rules = decoding.model, decoding.windows
    times = model.manifest.timestamps
    assert rules is not None
    assert times is not None
    [(name, sound)] = whole.request.sources.items()
    width = model.sources[name].axes[1]
    assert isinstance(width, int)
    num_frames = min(math.ceil(whole.num_seconds * SAMPLE_RATE / HOP), sound.shape[1])  # without padding
    is_piece = decoding.options.long_source != LONG_SOURCE_SEQUENTIAL
    frames_per_step = round(times.step_seconds * SAMPLE_RATE / HOP)
    said, start_ids = split_start(whole.request.start_ids, model)
    detected_ids = whole.request.detected_ids
    arrival, begin, has_begun, is_doubted = whole.request.arrival, 0, False, False
    num_left = whole.request.max_new_tokens if is_piece else math.inf  # tokens: their attention takes memory
    least = width // _LEAST_SHARE // frames_per_step
    while begin < num_frames - (least * frames_per_step if is_doubted else 0):
        heard = sound[:, begin : begin + width]
        is_flat = heard.min() == heard.max()  # nothing is within the spectrogram's range of the loudest place
        if is_flat and (has_begun or begin + width < num_frames):
            begin += width
            continue
        before = after_text(said, model, rules.hot_ids) if said or rules.hot_ids else ()
        request = replace(
            whole.request,
            sources={name: _padded(heard, width)},
            start_ids=(*before, *start_ids),
            detected_ids=detected_ids,
            max_new_tokens=min(whole.request.max_new_tokens, model.max_target_length - len(before)),
            arrival=arrival,
        )
        result, window, is_silent, is_trusted = await decode_window(
            request, replace(rules, always_listens=True) if is_doubted else rules, model, decode
        )
        is_silent |= is_doubted and window.no_speech_probability > rules.max_no_speech
        begin_seconds = whole.begin_seconds + begin * HOP / SAMPLE_RATE
        window.begin_seconds, _ = times_in_sound(begin_seconds, begin_seconds, whole.parts)
        num_kept, num_steps, is_doubted = 0, None, False
        if not (is_silent or is_flat):
            start_ids, detected_ids = result.start_ids[len(before) :], ()  # the others are in its language
            num_kept, num_steps = whole_segments(result.best.token_ids, times, least)
            last_id = next(reversed(result.best.token_ids), -1)
            if is_piece and num_steps is None and times.has(last_id) and last_id - times.first_id >= least:
                num_steps, is_doubted = last_id - times.first_id, True
            num_left -= len(result.best.token_ids)
            if num_left <= 0:
                num_kept, num_steps = len(result.best.token_ids), None
        num_seconds = min(width * HOP / SAMPLE_RATE, whole.num_seconds - begin * HOP / SAMPLE_RATE)
        yield (
            replace(
                whole,
                request=replace(request, sources={}),
                begin_seconds=begin_seconds,
                num_seconds=num_seconds,
                window=window,
            ),
            _cut(result, num_kept, time.monotonic() - whole.request.arrival),
        )
        if not is_piece:  # pieces are decoded with the prompt alone
            said += result.best.token_ids[:num_kept]
            if not (rules.is_conditioned and is_trusted):
                said = []
        begin += width if num_steps is None else num_steps * frames_per_step
        arrival, has_begun = time.monotonic(), True


def whole_segments(token_ids: Sequence[int], times: Timestamps, least_steps: int) -> tuple[int, int | None]:
    """Returns how many tokens of a window are whole segments, and the time at which the next window begins.

    What follows the last pair of times is cut at the end of the window, unless it ends with a single time:
    then nobody speaks after it. Without a pair, the target is one segment.

    Args:
        token_ids: The target of the window.
        times: The tokens of times.
        least_steps: An earlier time than this does not begin a window.

    Returns:
        The number of tokens, and the time in steps of the tokens; None is the end of the window.
    """
    is_time = [times.has(token_id) for token_id in token_ids]
    pairs = [place for place in range(1, len(is_time)) if is_time[place - 1] and is_time[place]]
    if pairs and is_time[-2:] != [False, True]:
        num_steps = token_ids[pairs[-1] - 1] - times.first_id
        if num_steps >= least_steps:
            return pairs[-1], num_steps
    return len(token_ids), None


async def decode_window(request: Request, rules: WindowRules, model: ServedModel, decode: Decode) -> Decoded:
    """Decodes a window until its text is good; if none is, takes the most probable one without repetition.

    Only the best result is kept beside the present one: their attention may take much memory.
    """
    times = model.manifest.timestamps
    assert times is not None
    no_speech = best = None
    best_rank = False, -math.inf
    for temperature in rules.temperatures:
        result = await decode(_attempt(request, temperature), best is not None)
        hypothesis = result.best
        log_probabilities = [each.log_probability for each in hypothesis.token_scores]
        text = model.target_tokenizer.decode(
            [token_id for token_id in hypothesis.token_ids if not times.has(token_id)]
        )
        window = Window(
            temperature=temperature,
            mean_log_probability=sum(log_probabilities) / len(log_probabilities),
            compression_ratio=compression_ratio(text),
        )
        is_unsure = window.mean_log_probability < rules.min_log_probability
        if no_speech is None and (is_unsure or rules.always_listens):
            scored = await decode(_no_speech(request, model), True)
            no_speech = math.exp(scored.best.token_scores[0].log_probability)
        if no_speech is not None:
            window.no_speech_probability = no_speech
        is_silent = is_unsure and window.no_speech_probability > rules.max_no_speech
        is_trusted = temperature <= _MOST_TRUSTED
        attempt = Decoded(result, window, is_silent=is_silent, is_trusted=is_trusted)
        is_varied = window.compression_ratio <= rules.max_compression_ratio
        if is_silent or (is_varied and not is_unsure):
            return attempt
        rank = is_varied, window.mean_log_probability
        if best is None or rank > best_rank:
            best, best_rank = attempt, rank
        del attempt, result
    assert best is not None
    return best._replace(is_trusted=is_trusted)


def _attempt(request: Request, temperature: float) -> Request:
    """Returns the request to decode a window at a temperature."""
    beam, sampling = request.beam, request.sampling
    if temperature and sampling is None:
        sampling = Sampling(temperature, top_k=0, top_p=1.0, min_p=0.0, seed=0)
        beam = None
    return replace(
        request, sources=dict(request.sources), beam=beam, sampling=sampling, log_probabilities=True
    )


def _no_speech(request: Request, model: ServedModel) -> Request:
    """Returns the request to score the token that stands for no speech, directly after the start."""
    assert model.manifest.timestamps is not None
    num_known = request.start_ids.index(model.manifest.template.start[0]) + 1
    return Request(
        request_id=request.request_id,
        sources=dict(request.sources),
        memory_length=request.memory_length,
        max_new_tokens=1,
        arrival=time.monotonic(),
        deadline=request.deadline,
        priority=request.priority,
        caller=request.caller,
        prefix_ids=(model.manifest.timestamps.no_speech_id,),
        start_ids=request.start_ids[:num_known],
        is_score=True,
        adapter=request.adapter,
    )


def _padded(heard: Array, width: int) -> Array:
    """Returns the spectrogram of a window, with zeros after the end of the sound, as Whisper is used."""
    window = np.zeros((len(heard), width), heard.dtype)
    window[:, : heard.shape[1]] = heard
    return window


def _cut(result: Result, num_kept: int, total_seconds: float) -> Result:
    """Returns the result with the first tokens of its target only."""
    best, timings = result.best, result.timings._replace(total_seconds=total_seconds)
    if num_kept < len(best.token_ids):
        best = best._replace(
            token_ids=best.token_ids[:num_kept],
            token_scores=best.token_scores[:num_kept],
            finish_reason=FinishReason.EOS,  # the next window has the rest
        )
    return result._replace(hypotheses=(best,), timings=timings)
