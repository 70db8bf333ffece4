"""Turns the engine's records into messages of `seq2seq.v1`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import numpy as np

from seq2seq_serve.bundle.names import SOURCE_LANGUAGE
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.async_engine import Stream
from seq2seq_serve.server.engine.request import Array, Request
from seq2seq_serve.server.engine.result import Choice, FinishReason, Hypothesis, Result
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.read.requests import Job, target_text
from seq2seq_serve.server.service.read.sentences import space_after
from seq2seq_serve.server.service.read.sources import Part

_FINISH_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
}

# Bytes in an answer: of a token's text, id and log-probability, and of those of an alternative token.
_TOKEN_BYTES, _ALTERNATIVE_BYTES = 16, 24
_WEIGHT_BYTES = 4  # of one attention weight
_SEGMENT_BYTES = 40  # of a segment with the text of one token


def estimated_bytes(job: Job, model: ServedModel, options: pb.GenerateOptions) -> int:
    """Returns the size of a job's answer if every hypothesis reaches its maximum length."""
    request = job.request
    target_length = len(request.prefix_ids) + request.max_new_tokens + 1
    each = target_length * (_TOKEN_BYTES + _ALTERNATIVE_BYTES * request.num_alternatives)
    if options.attention:
        num_weights = target_length * request.memory_length
        each += num_weights * (1 + model.num_hops if model.num_hops > 1 else 1) * _WEIGHT_BYTES
        each += sum(len(sentence.encode()) for sentence in job.part.sentences)
    if options.timestamps:
        each += target_length * _SEGMENT_BYTES
    if request.attention:
        each += (target_length + request.memory_length) * _TOKEN_BYTES
    return request.num_hypotheses * each


def checked(result: Result) -> Result:
    """Returns the result of a request that succeeded; raises the ServerError of one that failed."""
    if result.error is not None:
        raise result.error
    return result


async def pieces(job: Job, stream: Stream, model: ServedModel) -> AsyncGenerator[pb.Piece]:
    """Yields the pieces of a request's targets until they are complete."""
    async for _, token_ids, result in stream.updates():
        for place, new in token_ids.items():
            if place not in job.texts:
                job.texts[place] = target_text(job.request, model)
            yield pb.Piece(text=job.texts[place].push(new), token_ids=new, hypothesis=place)
        if result is not None and result.error is None:
            rests = {place: text.finish() for place, text in job.texts.items()}
            target = job.texts[0].text if 0 in job.texts else ""
            rests[0] = rests.get(0, "") + _separator(target, job)
            for place, rest in rests.items():
                if rest:
                    yield pb.Piece(text=rest, hypothesis=place)


def generate_response(
    jobs: Sequence[Job], results: Sequence[Result], model: ServedModel, options: pb.GenerateOptions
) -> pb.GenerateResponse:
    """Returns the answer of a call from the results of its requests."""
    answers = [
        pb.Sentence(
            source_text=job.part.text,
            hypotheses=[
                _hypothesis(job, place, one, model, options) for place, one in enumerate(result.hypotheses)
            ],
            usage=pb.Usage(
                source_tokens=result.num_source_tokens,
                target_tokens=result.num_target_tokens,
                truncated_source_tokens=job.part.num_truncated,
            ),
        )
        for job, result in zip(jobs, results, strict=True)
    ]
    is_split = len(answers) > 1
    return pb.GenerateResponse(
        request_id=jobs[0].request.request_id,
        model=model.name,
        hypotheses=[_joined(jobs, answers)] if is_split else answers[0].hypotheses,
        usage=pb.Usage(
            source_tokens=sum(answer.usage.source_tokens for answer in answers),
            target_tokens=sum(answer.usage.target_tokens for answer in answers),
            truncated_source_tokens=sum(answer.usage.truncated_source_tokens for answer in answers),
        ),
        timings=pb.Timings(
            queue_seconds=max(result.timings.queue_seconds for result in results),
            encode_seconds=max(result.timings.encode_seconds for result in results),
            first_token_seconds=results[0].timings.first_token_seconds,
            total_seconds=max(result.timings.total_seconds for result in results),
            draft_tokens=sum(result.timings.draft_tokens for result in results),
            accepted_tokens=sum(result.timings.accepted_tokens for result in results),
        ),
        sentences=answers if is_split else (),
        detected_language=_detected_language(jobs[0].request, results[0], model)
        if jobs[0].request.detected_ids
        else "",
    )


def _detected_language(request: Request, result: Result, model: ServedModel) -> str:
    token_id = result.start_ids[request.start_ids.index(None)]
    ids = model.choices[SOURCE_LANGUAGE].ids
    return next(name for name in ids if ids[name] == token_id)


def _joined(jobs: Sequence[Job], answers: Sequence[pb.Sentence]) -> pb.Hypothesis:
    """Returns the best hypotheses of all sentences, joined."""
    best = [answer.hypotheses[0] for answer in answers]
    reasons = [one.finish_reason for one in best if one.finish_reason != pb.FINISH_REASON_EOS]
    return pb.Hypothesis(
        text="".join(one.text + _separator(one.text, job) for one, job in zip(best, jobs, strict=True)),
        token_ids=[token_id for one in best for token_id in one.token_ids],
        finish_reason=reasons[0] if reasons else pb.FINISH_REASON_EOS,
        segments=[segment for one in best for segment in one.segments],
    )


def _separator(target: str, job: Job) -> str:
    """Returns what stands between the target of a part and the next one."""
    return space_after(target) if job.part.separator is None else job.part.separator


def _hypothesis(
    job: Job, place: int, hypothesis: Hypothesis, model: ServedModel, options: pb.GenerateOptions
) -> pb.Hypothesis:
    request, text = job.request, job.texts.get(place)
    if text is None or text.token_ids != list(hypothesis.token_ids):  # it was not streamed, or not all of it
        text = target_text(request, model)
        text.push(hypothesis.token_ids)
        text.finish()
    message = pb.Hypothesis(
        text=text.text,
        token_ids=hypothesis.token_ids,
        finish_reason=_FINISH_REASONS[hypothesis.finish_reason],
    )
    if request.log_probabilities:
        message.log_probabilities.extend(choice.log_probability for choice in hypothesis.choices)
    if request.log_probabilities or request.beam is not None:
        message.score = hypothesis.score
    if request.num_alternatives:
        _add_alternatives(message, hypothesis.choices, model)
    if options.attention:
        message.attention.CopyFrom(_attention(job, hypothesis, model))
    if options.timestamps:
        message.segments.extend(_segments(job.part, hypothesis, model))
    if options.word_alignment:
        message.word_alignment.CopyFrom(_word_alignment(request, hypothesis, model))
    return message


def _segments(part: Part, hypothesis: Hypothesis, model: ServedModel) -> list[pb.Segment]:
    """Returns what was said between the times of a target, none of them after the end of the sound."""
    times = model.timestamps
    assert times is not None
    segments: list[pb.Segment] = []
    begin, said = 0.0, list[int]()

    def end_at(seconds: float) -> None:
        if said:
            segments.append(
                pb.Segment(
                    begin_seconds=part.begin_seconds + begin,
                    end_seconds=part.begin_seconds + seconds,
                    text=model.target_tokenizer.decode(said),
                )
            )
            said.clear()

    for token_id in hypothesis.token_ids:
        if token_id < times.first_id:
            said.append(token_id)
            continue
        seconds = min((token_id - times.first_id) * times.step_seconds, part.num_seconds)
        end_at(seconds)
        begin = seconds
    end_at(part.num_seconds)
    return segments


def score_response(request: Request, result: Result, model: ServedModel) -> pb.ScoreResponse:
    """Returns the log-probabilities of a given target."""
    log_probabilities = [choice.log_probability for choice in result.best.choices]
    return pb.ScoreResponse(
        request_id=request.request_id,
        model=model.name,
        score=sum(log_probabilities),
        log_probabilities=log_probabilities,
        target_tokens=model.target_tokenizer.pieces([*request.prefix_ids, model.eos_id]),
        timings=pb.Timings(**result.timings._asdict()),
    )


def _add_alternatives(message: pb.Hypothesis, choices: Sequence[Choice], model: ServedModel) -> None:
    piece = model.target_tokenizer.piece
    for choice in choices:
        add = message.alternatives.add().tokens.add  # in place: adding copies takes twice as long
        for token_id, log_probability in choice.alternatives:
            add(token_id=token_id, text=piece(token_id), log_probability=log_probability)


def _attention(job: Job, hypothesis: Hypothesis, model: ServedModel) -> pb.Attention:
    attention = hypothesis.attention  # (T, S), or (T, hops, S)
    assert attention is not None
    target_ids = list(hypothesis.token_ids)
    if hypothesis.finish_reason is FinishReason.EOS:
        target_ids.append(model.eos_id)
    assert len(attention) == len(target_ids)
    assert attention.shape[-1] == job.request.memory_length
    message = pb.Attention(
        source_tokens=_source_labels(job, model), target_tokens=model.target_tokenizer.pieces(target_ids)
    )
    hops = [attention] if attention.ndim == 2 else list(np.moveaxis(attention, 1, 0))
    _add_weights(message, hops[-1])
    for weights in hops if len(hops) > 1 else ():
        _add_weights(message.hops.add(), weights)
    return message


def _source_labels(job: Job, model: ServedModel) -> list[str]:
    """Returns the labels of the positions of memory; an empty list for pictures, clips and features."""
    if model.reads_text:
        return model.source_tokenizer.pieces(job.request.sources[model.memory.source].tolist())
    return job.part.sentences


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
    sources = model.source_tokenizer.words(request.sources[model.memory.source].tolist())
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
        kind=model.kind,
        precision=model.precision,
        provider=model.provider,
        vocab_size=model.vocab_size,
        max_source_length=model.max_memory_length,
        max_target_length=model.max_target_length,
        num_slots=model.num_slots,
        eos_ids=model.eos_ids,
        provenance=dict(model.provenance),
        sources={name: source.form for name, source in model.sources.items()},
        has_attention=model.has_attention,
        source_shapes={
            name: pb.Shape(sizes=[axis if isinstance(axis, int) else -1 for axis in source.axes])
            for name, source in model.sources.items()
        },
        choices={
            name: pb.Choice(names=sorted(choice.ids), default=choice.default)
            for name, choice in model.choices.items()
        },
    )
