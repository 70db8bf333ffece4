"""Turns the engine's records into messages of `seq2seq.v1`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from math import inf

import numpy as np

from seq2seq_serve.bundle.audio import SAMPLE_RATE, SPEECH_MARGIN
from seq2seq_serve.bundle.names import SOURCE_LANGUAGE
from seq2seq_serve.bundle.tokenizer import TextStream
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.async_engine import Stream
from seq2seq_serve.server.engine.request import Array, Request
from seq2seq_serve.server.engine.result import FinishReason, Hypothesis, Result, TokenScore
from seq2seq_serve.server.engine.stops import StopSequences
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.read.inputs import position_seconds
from seq2seq_serve.server.service.read.options import Decoding
from seq2seq_serve.server.service.read.sentences import space_after
from seq2seq_serve.server.service.read.sources import Reading
from seq2seq_serve.server.service.write.word_times import Times, token_times, words_of

_FINISH_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
}

# Bytes in an answer: of a token's text, id and log-probability, and of those of an alternative token.
_TOKEN_BYTES, _ALTERNATIVE_BYTES = 16, 24
_WEIGHT_BYTES = 4  # of one attention weight
_MOST_OVER = 0.5  # seconds that a word reaches over the time of its segment
_SEGMENT_BYTES = 40  # of a segment or word with the text of one token


class StoppedText:
    """Turns token ids into pieces of text that stay valid whatever tokens follow.

    Owned by the handler that sends the pieces. Invariant: all pieces, joined with the text of `finish()`, are
    the text before the stop sequence that is complete first.

    Args:
        stream: A new stream of the target tokenizer.
        stops: The stop sequences; None for none.
        num_prefix: The number of tokens at the beginning that are not searched for stop sequences.

    Attributes:
        is_stopped: Whether a stop sequence is complete.
        text: All pieces so far, joined.
    """

    def __init__(self, stream: TextStream, stops: StopSequences | None, num_prefix: int) -> None:
        self.is_stopped = False
        self.text = ""
        self._stream = stream
        self._stops = stops
        self._num_prefix = num_prefix
        self._held = b""  # may be the beginning of a stop sequence

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that is certain with these tokens."""
        piece = self._stream.push(token_ids) if self._stops is None else self._push(token_ids, self._stops)
        self.text += piece
        return piece

    def finish(self) -> str:
        """Returns the rest of the text after the last token."""
        rest = self._stream.push_bytes(self._held) + self._stream.finish()
        self.text += rest
        return rest

    def _push(self, token_ids: Sequence[int], stops: StopSequences) -> str:
        if self.is_stopped:
            return ""
        prefix, rest = token_ids[: self._num_prefix], token_ids[self._num_prefix :]
        self._num_prefix -= len(prefix)
        num_searched = len(self._held)
        data = self._held + self._stream.bytes_of(rest)
        begin = stops.find(data, num_searched)
        self.is_stopped = begin is not None
        num_certain = len(data) - stops.num_uncertain(data) if begin is None else begin
        self._held = b"" if self.is_stopped else data[num_certain:]
        return self._stream.push(prefix) + self._stream.push_bytes(data[:num_certain])


def estimated_bytes(reading: Reading, decoding: Decoding) -> int:
    """Returns the size of the answer to a reading if every hypothesis reaches its maximum length."""
    request, num_hops = reading.request, decoding.model.sizing.num_hops
    target_length = len(request.prefix_ids) + request.max_new_tokens + 1
    each = target_length * (_TOKEN_BYTES + _ALTERNATIVE_BYTES * request.num_alternatives)
    if decoding.options.attention:
        num_weights = target_length * request.memory_length
        each += num_weights * (1 + num_hops if num_hops > 1 else 1) * _WEIGHT_BYTES
        each += sum(len(sentence.encode()) for sentence in reading.sentences)
    if decoding.options.timestamps:
        each += target_length * _SEGMENT_BYTES * (1 + decoding.options.word_timestamps)
    if request.attention:
        each += (target_length + request.memory_length) * _TOKEN_BYTES
    return request.num_hypotheses * each


def estimated_attention_bytes(request: Request, decoding: Decoding) -> int:
    """Returns the size of the attention from which the words of a request's targets get their times.

    It is not in the answer, and as large as that of the longest targets.
    """
    target_length = len(request.prefix_ids) + request.max_new_tokens + 1
    num_weights = target_length * decoding.model.sizing.num_alignment_heads * request.memory_length
    return request.num_hypotheses * num_weights * _WEIGHT_BYTES


def checked(result: Result) -> Result:
    """Returns the result of a request that succeeded; raises the ServerError of one that failed."""
    if result.error is not None:
        raise result.error
    return result


async def pieces(reading: Reading, stream: Stream, decoding: Decoding) -> AsyncGenerator[pb.Piece]:
    """Yields the pieces of a reading's targets until they are complete."""
    texts: dict[int, StoppedText] = {}
    async for _, token_ids, result in stream.updates():
        for place, new in token_ids.items():
            if place not in texts:
                texts[place] = _target_text(decoding)
            yield pb.Piece(text=texts[place].push(new), token_ids=new, hypothesis=place)
        if result is not None and result.error is None:
            rests = {place: text.finish() for place, text in texts.items()}
            target = texts[0].text if 0 in texts else ""
            rests[0] = rests.get(0, "") + _separator(target, reading)
            for place, rest in rests.items():
                if rest:
                    yield pb.Piece(text=rest, hypothesis=place)


def _target_text(decoding: Decoding) -> StoppedText:
    """Creates the decoder of a target's text, which ends before the first stop sequence of the request."""
    request = decoding.request
    # A token with a space before it may be drawn first, and a term be spelled as after another word.
    may_begin_so = request.sampling is not None or decoding.glossary is not None
    strips_space = may_begin_so and not request.prefix_ids and decoding.windows is None
    stream = decoding.model.target_tokenizer.stream(strips_space=strips_space)
    return StoppedText(stream, request.stops, len(request.prefix_ids))


def window_piece(result: Result, decoding: Decoding) -> pb.Piece:
    """Returns the piece of a window of a sound, which is complete."""
    text = _target_text(decoding)
    return pb.Piece(text=text.push(result.best.token_ids) + text.finish(), token_ids=result.best.token_ids)


def generate_response(pairs: Sequence[tuple[Reading, Result]], decoding: Decoding) -> pb.GenerateResponse:
    """Returns the answer of a call from the results of its requests.

    Args:
        pairs: Its sources and the result of each, from `with_token_times`.
        decoding: How they were decoded.
    """
    readings, results = [reading for reading, _ in pairs], [result for _, result in pairs]
    sentences: list[pb.Sentence] = []
    if len(pairs) == 1:
        hypotheses = _hypotheses(readings[0], results[0], decoding)
    else:
        sentences = [_sentence(reading, result, decoding) for reading, result in pairs]
        hypotheses = [_joined(readings, sentences)]
    return pb.GenerateResponse(
        request_id=readings[0].request.request_id,
        model=decoding.model.name,
        hypotheses=hypotheses,
        usage=pb.Usage(
            source_tokens=sum(result.num_source_tokens for result in results),
            target_tokens=sum(result.num_target_tokens for result in results),
            truncated_source_tokens=sum(reading.num_truncated for reading in readings),
            source_seconds=readings[-1].sound_seconds,
        ),
        timings=pb.Timings(
            queue_seconds=max(result.timings.queue_seconds for result in results),
            encode_seconds=max(result.timings.encode_seconds for result in results),
            first_token_seconds=results[0].timings.first_token_seconds,
            total_seconds=max(result.timings.total_seconds for result in results),
            draft_tokens=sum(result.timings.draft_tokens for result in results),
            accepted_tokens=sum(result.timings.accepted_tokens for result in results),
        ),
        sentences=sentences,
        unknown_words=readings[0].unknown_words,
        detected_language=_detected_language(results, decoding) if decoding.request.detected_ids else "",
    )


def _sentence(reading: Reading, result: Result, decoding: Decoding) -> pb.Sentence:
    """Returns the answer of one of several readings."""
    return pb.Sentence(
        source_text=reading.text,
        hypotheses=_hypotheses(reading, result, decoding),
        usage=pb.Usage(
            source_tokens=result.num_source_tokens,
            target_tokens=result.num_target_tokens,
            truncated_source_tokens=reading.num_truncated,
            source_seconds=reading.times_in_sound(0, length)[1] if (length := reading.num_seconds) else 0,
        ),
    )


def _hypotheses(reading: Reading, result: Result, decoding: Decoding) -> list[pb.Hypothesis]:
    return [
        _hypothesis(reading, one, times, decoding)
        for one, times in zip_longest(result.hypotheses, reading.token_times)
    ]


def _detected_language(results: Sequence[Result], decoding: Decoding) -> str:
    """Returns the language of the first text; without any text the model's default, or its first language."""
    choice, start_ids = decoding.model.manifest.choices[SOURCE_LANGUAGE], decoding.request.start_ids
    heard = next((result for result in results if result.best.token_ids), None)
    if heard is None:
        return choice.default or min(choice.ids, key=choice.ids.__getitem__)
    token_id = heard.start_ids[start_ids.index(None) - len(start_ids)]  # a text before it has any length
    return next(name for name, its_id in choice.ids.items() if its_id == token_id)


def _joined(readings: Sequence[Reading], answers: Sequence[pb.Sentence]) -> pb.Hypothesis:
    """Returns the best hypotheses of all sentences, joined."""
    best = [answer.hypotheses[0] for answer in answers]
    reasons = [one.finish_reason for one in best if one.finish_reason != pb.FINISH_REASON_EOS]
    return pb.Hypothesis(
        text="".join(
            one.text + _separator(one.text, reading) for one, reading in zip(best, readings, strict=True)
        ),
        token_ids=[token_id for one in best for token_id in one.token_ids],
        finish_reason=reasons[0] if reasons else pb.FINISH_REASON_EOS,
        score=sum(one.score for one in best) if all(one.HasField("score") for one in best) else None,
        log_probabilities=[one for each in best for one in each.log_probabilities],
        segments=_in_a_row([segment for one in best for segment in one.segments]),
        missing_terms=dict.fromkeys(term for one in best for term in one.missing_terms),
    )


def _in_a_row(segments: list[pb.Segment]) -> list[pb.Segment]:
    """Lets segments end where the next one begins, at the latest: the last word of a window may end later."""
    for segment, following in pairwise(segments):
        end = max(following.begin_seconds, segment.begin_seconds)
        timed: list[pb.Segment | pb.Word] = [segment, *reversed(segment.words)]
        for one in timed:
            if one.end_seconds <= end:
                break
            one.end_seconds = end
            one.begin_seconds = min(one.begin_seconds, end)
    return segments


def _separator(target: str, reading: Reading) -> str:
    """Returns what stands between the target of a reading and the next one."""
    return space_after(target) if reading.separator is None else reading.separator


def _hypothesis(
    reading: Reading, hypothesis: Hypothesis, token_times: Times | None, decoding: Decoding
) -> pb.Hypothesis:
    request, text = reading.request, _target_text(decoding)
    text.push(hypothesis.token_ids)
    text.finish()
    message = pb.Hypothesis(
        text=text.text,
        token_ids=hypothesis.token_ids,
        finish_reason=_FINISH_REASONS[hypothesis.finish_reason],
    )
    if request.log_probabilities:
        message.log_probabilities.extend(each.log_probability for each in hypothesis.token_scores)
    if request.log_probabilities or request.beam is not None:
        message.score = hypothesis.score
    if request.num_alternatives:
        _add_alternatives(message, hypothesis.token_scores, decoding.model)
    if decoding.options.attention:
        message.attention.CopyFrom(_attention(reading, hypothesis, decoding.model))
    if decoding.options.timestamps:
        message.segments.extend(_segments(reading, hypothesis, decoding.model, token_times))
        if reading.window is not None:
            for segment in message.segments:
                segment.window.CopyFrom(reading.window)
    if reading.required is not None:
        message.missing_terms.extend(reading.required.missing(hypothesis.missing, text.text))
    if decoding.options.word_alignment:
        message.word_alignment.CopyFrom(_word_alignment(request, hypothesis, decoding.model))
    return message


def with_token_times(
    reading: Reading, result: Result, decoding: Decoding, checkpoint: YieldPoint
) -> tuple[Reading, Result]:
    """Returns a reading with the times of its targets' tokens, and a result without what gave them.

    Its attention, which may have hundreds of megabytes, is kept only if the request asks for it. An error
    that `checkpoint` raises ends the work.
    """
    times = tuple(_token_times(reading, one, decoding.model, checkpoint) for one in result.hypotheses)
    if not decoding.options.attention:
        result = result._replace(hypotheses=tuple(one._replace(attended=[]) for one in result.hypotheses))
    return replace(reading, token_times=times), result


def attention_bytes(result: Result) -> int:
    """Returns the size of a result's attention."""
    return sum(weights.nbytes for hypothesis in result.hypotheses for weights in hypothesis.attended)


def _token_times(
    reading: Reading, hypothesis: Hypothesis, model: ServedModel, checkpoint: YieldPoint
) -> Times:
    assert hypothesis.attention is not None
    assert model.manifest.timestamps is not None
    times = model.manifest.timestamps
    return token_times(
        hypothesis.attention,
        hypothesis.token_ids,
        times,
        reading.num_seconds,
        position_seconds(model),
        checkpoint,
    )


def _segments(
    reading: Reading, hypothesis: Hypothesis, model: ServedModel, spoken: Times | None
) -> list[pb.Segment]:
    """Returns what was said between the times of a target, none of them after the end of the sound.

    With the times of words, a segment has those of its first and last word.
    """
    times = model.manifest.timestamps
    assert times is not None
    segments: list[pb.Segment] = []
    begin, said = 0.0, list[int]()

    def end_at(seconds: float, place: int) -> None:
        if said:
            first, last = _rounded(
                reading.times_in_sound(begin, seconds, SPEECH_MARGIN / SAMPLE_RATE), reading
            )
            words = _words(reading, said, place - len(said), model, spoken)
            if words:
                first, last = _times_of_words(words, first, last)
            segments.append(
                pb.Segment(
                    begin_seconds=first,
                    end_seconds=last,
                    text=model.target_tokenizer.decode(said),
                    token_ids=said,
                    words=words,
                )
            )
            said.clear()

    for place, token_id in enumerate(hypothesis.token_ids):
        if not times.has(token_id):
            said.append(token_id)
            continue
        seconds = min((token_id - times.first_id) * times.step_seconds, reading.num_seconds)
        end_at(seconds, place)
        begin = seconds
    end_at(reading.num_seconds, len(hypothesis.token_ids))
    return segments


def _words(
    reading: Reading, said: Sequence[int], first_place: int, model: ServedModel, spoken: Times | None
) -> list[pb.Word]:
    if spoken is None:
        return []
    words = []
    for word in words_of(said, model.target_tokenizer):
        first, last = spoken[first_place + word.first][0], spoken[first_place + word.last][1]
        begin, end = _rounded(reading.times_in_sound(first, last, inf), reading)
        words.append(pb.Word(begin_seconds=begin, end_seconds=end, text=word.text))
    return words


def _rounded(times: tuple[float, float], reading: Reading) -> tuple[float, float]:
    """Returns times in whole milliseconds, at most the end of the sound: sums of them have many digits."""
    begin, end = (min(round(time, 3), reading.sound_seconds) for time in times)
    return begin, end


def _times_of_words(words: Sequence[pb.Word], begin: float, end: float) -> tuple[float, float]:
    """Returns the times of a segment: from its first word to its last, as in Whisper's code (`timing.py`).

    A word that reaches far over the segment's own time goes on in a pause, and is cut there.
    """
    first, last = words[0], words[-1]
    if first.begin_seconds + _MOST_OVER < begin < first.end_seconds:
        first.begin_seconds = begin
    if last.begin_seconds < end < last.end_seconds - _MOST_OVER:
        last.end_seconds = end
    return first.begin_seconds, last.end_seconds


def score_response(reading: Reading, result: Result, decoding: Decoding) -> pb.ScoreResponse:
    """Returns the log-probabilities of a given target."""
    request, model = reading.request, decoding.model
    log_probabilities = [each.log_probability for each in result.best.token_scores]
    return pb.ScoreResponse(
        request_id=request.request_id,
        model=model.name,
        score=sum(log_probabilities),
        log_probabilities=log_probabilities,
        target_tokens=model.target_tokenizer.pieces([*request.prefix_ids, model.eos_id]),
        timings=pb.Timings(**result.timings._asdict()),
    )


def _add_alternatives(message: pb.Hypothesis, token_scores: Sequence[TokenScore], model: ServedModel) -> None:
    piece = model.target_tokenizer.piece
    for each in token_scores:
        add = message.alternatives.add().tokens.add  # in place: adding copies takes twice as long
        for token_id, log_probability in each.alternatives:
            add(token_id=token_id, text=piece(token_id), log_probability=log_probability)


def _attention(reading: Reading, hypothesis: Hypothesis, model: ServedModel) -> pb.Attention:
    attention = hypothesis.attention  # (T, S), or (T, hops or heads, S)
    assert attention is not None
    if model.sizing.num_alignment_heads:
        attention = attention.mean(axis=1)
    target_ids = list(hypothesis.token_ids)
    if hypothesis.finish_reason is FinishReason.EOS:
        target_ids.append(model.eos_id)
    assert len(attention) == len(target_ids)
    assert attention.shape[-1] == reading.request.memory_length
    message = pb.Attention(
        source_tokens=_source_labels(reading, model), target_tokens=model.target_tokenizer.pieces(target_ids)
    )
    hops = [attention] if attention.ndim == 2 else list(np.moveaxis(attention, 1, 0))
    _add_weights(message, hops[-1])
    for weights in hops if len(hops) > 1 else ():
        _add_weights(message.hops.add(), weights)
    return message


def _source_labels(reading: Reading, model: ServedModel) -> list[str]:
    """Returns the labels of the positions of memory; an empty list for pictures, clips and features."""
    if model.reads_text:
        return model.source_tokenizer.pieces(reading.request.sources[model.manifest.memory.source].tolist())
    return reading.sentences


def _add_weights(message: pb.Attention | pb.Hop, weights: Array) -> None:
    """Sets a message's weights; fast, because there is no object for each of them."""
    data = weights.astype("<f4").tobytes()
    tag = bytes([message.WEIGHTS_FIELD_NUMBER << 3 | 2])  # precedes packed numbers
    message.MergeFromString(tag + _varint(len(data)) + data)


def _varint(number: int) -> bytes:
    """Returns a number in protobuf's wire format."""
    octets = bytearray()
    while number > 127:
        octets.append(number & 127 | 128)
        number >>= 7
    return bytes((*octets, number))


def _word_alignment(request: Request, hypothesis: Hypothesis, model: ServedModel) -> pb.WordAlignment:
    attention = hypothesis.attention
    assert attention is not None
    sources = model.source_tokenizer.words(request.sources[model.manifest.memory.source].tolist())
    targets = model.target_tokenizer.words(hypothesis.token_ids)
    links = []
    for place, (_, target_places) in enumerate(targets):
        weights = attention[target_places].mean(axis=0)  # (S,)
        shares = [float(weights[source_places].sum()) for _, source_places in sources]
        if shares:
            best = shares.index(max(shares))
            links.append(pb.WordLink(source_word=best, target_word=place, weight=shares[best]))
    return pb.WordAlignment(
        source_words=[word for word, _ in sources], target_words=[word for word, _ in targets], links=links
    )


def model_message(model: ServedModel) -> pb.Model:
    """Returns the description of a model for callers."""
    return pb.Model(
        name=model.name,
        version=model.version,
        kind=model.manifest.kind,
        precision=model.sizing.precision,
        provider=model.sizing.provider,
        vocab_size=model.sizing.vocab_size,
        max_source_length=model.max_memory_length,
        max_target_length=model.max_target_length,
        num_slots=model.engine.num_slots,
        eos_ids=model.manifest.special_ids.eos_ids,
        splits_sentences=model.manifest.generation.splits_sentences,
        provenance=dict(model.manifest.provenance),
        sources={name: source.form for name, source in model.sources.items()},
        has_attention=model.sizing.num_hops > 0,
        has_draft_model=model.sizing.draft is not None,
        source_language=model.manifest.source_language,
        target_language=model.manifest.target_language,
        source_shapes={
            name: pb.Shape(sizes=[axis if isinstance(axis, int) else -1 for axis in source.axes])
            for name, source in model.sources.items()
        },
        choices={
            name: pb.Choice(names=sorted(choice.ids), default=choice.default)
            for name, choice in model.manifest.choices.items()
        },
    )
