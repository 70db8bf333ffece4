"""The engine's records as messages of the wire contract."""

from __future__ import annotations

import dataclasses

from bundle.names import SOURCE_IDS
from protos import seq2seq_v1_pb2 as pb
from server.models import ServedModel
from server.records import Choice, FinishReason, Hypothesis, Request, Result

_FINISH_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
}


def generate_response(request: Request, result: Result, model: ServedModel) -> pb.GenerateResponse:
    """The answer to a request that ended well."""
    return pb.GenerateResponse(
        request_id=request.request_id,
        model=model.name,
        hypotheses=[_hypothesis(request, hypothesis, model) for hypothesis in result.hypotheses],
        usage=pb.Usage(source_tokens=result.num_source_tokens, target_tokens=result.num_target_tokens),
        timings=pb.Timings(**dataclasses.asdict(result.timings)),
    )


def _hypothesis(request: Request, hypothesis: Hypothesis, model: ServedModel) -> pb.Hypothesis:
    message = pb.Hypothesis(
        text=_text(request, hypothesis, model),
        token_ids=hypothesis.token_ids,
        finish_reason=_FINISH_REASONS[hypothesis.finish_reason],
    )
    if request.log_probabilities:
        message.log_probabilities.extend(choice.log_probability for choice in hypothesis.choices)
    if request.log_probabilities or request.beam is not None:
        message.score = hypothesis.score
    if request.num_alternatives:
        message.alternatives.extend(_alternatives(choice, model) for choice in hypothesis.choices)
    if hypothesis.attention is not None:
        message.attention.CopyFrom(_attention(request, hypothesis, model))
    return message


def _text(request: Request, hypothesis: Hypothesis, model: ServedModel) -> str:
    if request.follow is None:
        return model.target_tokenizer.decode(hypothesis.token_ids)
    text = request.follow()
    return text.push(hypothesis.token_ids) + text.finish()


def score_response(request: Request, result: Result, model: ServedModel) -> pb.ScoreResponse:
    """The log-probabilities of a given target."""
    log_probabilities = [choice.log_probability for choice in result.best.choices]
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


def _attention(request: Request, hypothesis: Hypothesis, model: ServedModel) -> pb.Attention:
    assert hypothesis.attention is not None
    target_ids = list(hypothesis.token_ids)
    if hypothesis.finish_reason is FinishReason.EOS:
        target_ids.append(model.eos_id)
    source_ids = request.sources[SOURCE_IDS].tolist()
    assert hypothesis.attention.shape == (len(target_ids), len(source_ids))
    return pb.Attention(
        source_tokens=model.source_tokenizer.pieces(source_ids),
        target_tokens=model.target_tokenizer.pieces(target_ids),
        weights=hypothesis.attention.ravel().tolist(),
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
