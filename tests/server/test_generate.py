"""Imported checkpoints answer through gRPC with the tokens and scores of transformers' `generate`."""

import asyncio
import random
from pathlib import Path

import pytest
import torch

from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.huggingface.exporter import export_checkpoint
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from tests.export.huggingface.checkpoints import CASES, make_checkpoint
from tests.server.service.harness import serving_bundles

_MAX_NEW_TOKENS = 10
_GAP = 2e-5  # of two scores that float32 may order either way
# What a caller sends, and the same for `generate`
SEARCHES = [
    ({}, {}),
    ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"beam_size": 2, "early_stopping": True}, {"num_beams": 2, "early_stopping": True}),
    (
        {"beam_size": 3, "early_stopping": False, "length_penalty": 2.0},
        {"num_beams": 3, "early_stopping": False, "length_penalty": 2.0},
    ),
    (
        {"beam_size": 4, "exhaustive_search": True, "length_penalty": 0.6, "num_hypotheses": 4},
        {"num_beams": 4, "early_stopping": "never", "length_penalty": 0.6, "num_return_sequences": 4},
    ),
    (
        {"beam_size": 5, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "num_hypotheses": 2},
        {"num_beams": 5, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "num_return_sequences": 2},
    ),
    (
        {"beam_size": 2, "encoder_no_repeat_ngram_size": 1, "min_new_tokens": 4, "length_penalty": -1.0},
        {"num_beams": 2, "encoder_no_repeat_ngram_size": 1, "min_new_tokens": 4, "length_penalty": -1.0},
    ),
]


def answers(message: pb.GenerateResponse, eos_id: int) -> list[list[int]]:
    return [
        [*one.token_ids, *([eos_id] if one.finish_reason == pb.FINISH_REASON_EOS else [])]
        for one in message.hypotheses
    ]


def generated(model, source: list[int], options: dict, eos_id: int) -> tuple[list[list[int]], list[float]]:
    """The targets without the start token, and the scores of a beam search."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([source]),
            max_new_tokens=_MAX_NEW_TOKENS,
            do_sample=False,
            use_cache=False,  # the cache of T5 has as many layers as the encoder
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    targets = []
    for row in found.sequences[:, 1:].tolist():
        end = row.index(eos_id) + 1 if eos_id in row else len(row)
        targets.append(row[:end])
    return targets, found.sequences_scores.tolist() if "sequences_scores" in found else []


def check_case(case: str, folder: Path, num_sources: int) -> None:
    theirs = make_checkpoint(case, folder / "checkpoint")
    export_checkpoint(folder / "checkpoint", folder / "bundle", [Precision.FP32])
    manifest = load_bundle(folder / "bundle").manifest
    (eos_id,) = manifest.special_ids.eos_ids
    chance = random.Random(case)
    taken = {manifest.special_ids.pad_id, eos_id}
    usable = [one for one in range(min(manifest.source_vocab_size, 60)) if one not in taken]
    choice = manifest.choices.get("target_language")
    num_ties = 0

    async def run() -> None:
        nonlocal num_ties
        async with serving_bundles(folder / "bundle") as served:
            for number in range(num_sources):
                source = [*chance.choices(usable, k=chance.randint(1, 9)), eos_id]
                ours, given = SEARCHES[number % len(SEARCHES)]
                options, settings = dict(ours, max_new_tokens=_MAX_NEW_TOKENS), dict(given)
                if choice is not None:
                    name = chance.choice(sorted(choice.ids))
                    options["target_language"] = name
                    if manifest.frames.forced:
                        settings["forced_bos_token_id"] = choice.ids[name]
                    elif "target_language" in manifest.frames.start:
                        settings["decoder_start_token_id"] = choice.ids[name]
                message = pb.GenerateRequest(
                    sources=[pb.Source(token_ids=pb.TokenIds(values=source))],
                    options=pb.GenerateOptions(**options),
                )
                response = await served.stub.Generate(message)
                targets, scores = generated(theirs, source, settings, eos_id)
                found = answers(response, eos_id)
                where = (case, number, settings, source)
                expected = pytest.approx(scores, abs=1e-4, rel=1e-6)
                if scores:
                    assert [one.score for one in response.hypotheses] == expected, where
                if found != targets:  # two hypotheses whose scores float32 orders either way
                    near = pytest.approx(scores, abs=_GAP, rel=1e-6)
                    assert scores, where
                    assert [one.score for one in response.hypotheses] == near, where
                    num_ties += 1

    asyncio.run(run())
    assert num_ties <= num_sources // 50


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_answers_as_generate_does(case, tmp_path):
    check_case(case, tmp_path, 2 * len(SEARCHES))


@pytest.mark.slow  # 200 sources
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_answers_two_hundred_sources_as_generate_does(case, tmp_path):
    check_case(case, tmp_path, 200)
