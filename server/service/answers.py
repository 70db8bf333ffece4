"""The engine's records as messages of the wire contract."""

from __future__ import annotations

import dataclasses

from bundle.names import SOURCE_IDS
from protos import seq2seq_v1_pb2 as pb
from server.models import ServedModel
from server.records import Choice, FinishReason, Request, Result

_FINISH_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
}


def generate_response(request: Request, result: Result, model: ServedModel) -> pb.GenerateResponse:
    """The answer to a request that ended well."""
    hypothesis = pb.Hypothesis(
        text=_text(request, result, model),
        token_ids=result.token_ids,
        finish_reason=_FINISH_REASONS[result.finish_reason],
    )
    if request.log_probabilities:
        hypothesis.log_probabilities.extend(choice.log_probability for choice in result.choices)
        hypothesis.score = sum(choice.log_probability for choice in result.choices)
    if request.num_alternatives:
        hypothesis.alternatives.extend(_alternatives(choice, model) for choice in result.choices)
    if result.attention is not None:
        hypothesis.attention.CopyFrom(_attention(request, result, model))
    return pb.GenerateResponse(
        request_id=request.request_id,
        model=model.name,
        hypotheses=[hypothesis],
        usage=pb.Usage(source_tokens=result.num_source_tokens, target_tokens=result.num_target_tokens),
        timings=pb.Timings(**dataclasses.asdict(result.timings)),
    )


def _text(request: Request, result: Result, model: ServedModel) -> str:
    if request.follow is None:
        return model.target_tokenizer.decode(result.token_ids)
    text = request.follow()
    return text.push(result.token_ids) + text.finish()


def score_response(request: Request, result: Result, model: ServedModel) -> pb.ScoreResponse:
    """The log-probabilities of a given target."""
    log_probabilities = [choice.log_probability for choice in result.choices]
    return pb.ScoreResponse(
        request_id=request.request_id,
        model=model.name,
        score=sum(log_probabilities),
        log_probabilities=log_probabilities,
        target_tokens=model.target_tokenizer.pieces([*request.prefix_ids, model.eos_id]),
        timings=pb.Timings(**dataclasses.asdict(result.timings)),
    )


def _alternatives(choice: Choice, model: ServedModel) -> pb.Alternatives:
    return pb.Alternatives(
        tokens=[
            pb.Alternative(
                token_id=token_id,
                text=model.target_tokenizer.pieces([token_id])[0],
                log_probability=log_probability,
            )
            for token_id, log_probability in choice.alternatives
        ]
    )


def _attention(request: Request, result: Result, model: ServedModel) -> pb.Attention:
    assert result.attention is not None
    target_ids = list(result.token_ids)
    if result.finish_reason is FinishReason.EOS:
        target_ids.append(model.eos_id)
    source_ids = request.sources[SOURCE_IDS].tolist()
    assert result.attention.shape == (len(target_ids), len(source_ids))
    return pb.Attention(
        source_tokens=model.source_tokenizer.pieces(source_ids),
        target_tokens=model.target_tokenizer.pieces(target_ids),
        weights=result.attention.ravel().tolist(),
    )


def model_message(model: ServedModel) -> pb.Model:
    """What callers are told of a model."""
    return pb.Model(
        name=model.name,
        version=model.version,
        kind=model.kind,
        precision=model.precision,
        provider=model.provider,
        vocab_size=model.vocab_size,
        max_source_length=model.engine.max_source_length,
        max_target_length=model.engine.max_target_length,
        num_slots=model.engine.num_slots,
        provenance=dict(model.provenance),
    )
