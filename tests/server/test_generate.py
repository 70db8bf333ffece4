"""Imported checkpoints answer through gRPC with the tokens and scores of transformers' `generate`."""

import asyncio
import io
import itertools
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageDraw
from transformers.generation import GenerationMixin, WhisperTimeStampLogitsProcessor

from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.huggingface.exporter import export_checkpoint
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from tests.export.huggingface.checkpoints import (
    PICTURES,
    SOUNDS,
    TEXTS,
    edit,
    make_checkpoint,
    read_checkpoint,
)
from tests.server.service.harness import serving_bundles

_MAX_NEW_TOKENS = 10
_BATCH = 5  # sources of one length, which `generate` takes in little more time than one
_GAP = 2e-5  # of two scores that float32 may order either way
_NAMES_OF_GENERATE = {"beam_size": "num_beams", "num_hypotheses": "num_return_sequences"}
SEARCHES = [
    {},
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty": 1.5},
    {"beam_size": 2, "early_stopping": True},
    {"beam_size": 3, "early_stopping": False, "length_penalty": 2.0},
    {"beam_size": 4, "exhaustive_search": True, "length_penalty": 0.6, "num_hypotheses": 4},
    {"beam_size": 5, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "num_hypotheses": 2},
    {"beam_size": 2, "encoder_no_repeat_ngram_size": 1, "min_new_tokens": 4, "length_penalty": -1.0},
]


_NUM_SOURCES = _BATCH * len(SEARCHES)

Target = tuple[list[int], bool]  # tokens, and whether an end of sequence follows
Expected = tuple[list[Target], list[float]]  # the targets of a source, and their scores in a beam search


def for_generate(options: dict) -> dict:
    """The settings of `generate` that search as the options of a request do."""
    settings = {_NAMES_OF_GENERATE.get(name, name): value for name, value in options.items()}
    if settings.pop("exhaustive_search", False):
        settings["early_stopping"] = "never"
    return settings


def answers(message: pb.GenerateResponse) -> list[Target]:
    return [(list(one.token_ids), one.finish_reason == pb.FINISH_REASON_EOS) for one in message.hypotheses]


def generated(model, sources: list[list[int]], options: dict, eos_ids: Sequence[int]) -> Iterator[Expected]:
    """The answers for sources of one length."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor(sources),
            max_new_tokens=_MAX_NEW_TOKENS,
            do_sample=False,
            use_cache=False,  # the cache of T5 has as many layers as the encoder
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    yield from read_rows(found, 1, len(sources), eos_ids)


def read_rows(found, num_given: int, num_sources: int, eos_ids: Sequence[int]) -> Iterator[Expected]:
    """What `generate` found for each source; its targets without the tokens that were given."""
    targets = []
    for row in found.sequences[:, num_given:].tolist():
        tokens = list(itertools.takewhile(lambda token_id: token_id not in eos_ids, row))
        targets.append((tokens, len(tokens) < len(row)))
    scores = found.sequences_scores.tolist() if "sequences_scores" in found else []
    num_hypotheses = len(targets) // num_sources
    for start in range(0, len(targets), num_hypotheses):
        its = slice(start, start + num_hypotheses)
        yield targets[its], scores[its]


def is_tie(answer: pb.GenerateResponse, expected: Expected, where: object) -> bool:
    """Compare an answer; returns whether two of its hypotheses have scores that float32 orders either way."""
    targets, scores = expected
    given = [one.score for one in answer.hypotheses]
    if scores:
        assert given == pytest.approx(scores, abs=1e-4, rel=1e-6), where
    if answers(answer) == targets:
        return False
    assert scores, (where, answers(answer), targets)
    assert given == pytest.approx(scores, abs=_GAP, rel=1e-6), where
    return True


def exported(folder: Path) -> Path:
    """The folder of a `checkpoint`, with its `bundle`."""
    export_checkpoint(folder / "checkpoint", folder / "bundle", [Precision.FP32])
    return folder


def check_texts(case: str, folder: Path, num_sources: int) -> None:
    theirs = read_checkpoint(case, folder / "checkpoint")
    manifest = load_bundle(folder / "bundle").manifest
    eos_ids = manifest.special_ids.eos_ids
    chance = random.Random(case)
    taken = {manifest.special_ids.pad_id, *eos_ids}
    usable = [one for one in range(min(manifest.source_vocab_size, 60)) if one not in taken]
    choice = manifest.choices.get("target_language")
    num_ties = 0

    async def run() -> None:
        nonlocal num_ties
        async with serving_bundles(folder / "bundle") as served:
            for number in range(num_sources // _BATCH):
                length = chance.randint(1, 9)
                sources = [[*chance.choices(usable, k=length), eos_ids[0]] for _ in range(_BATCH)]
                ours = SEARCHES[number % len(SEARCHES)]
                options, settings = dict(ours, max_new_tokens=_MAX_NEW_TOKENS), for_generate(ours)
                if choice is not None:
                    name = chance.choice(sorted(choice.ids))
                    options["target_language"] = name
                    if manifest.template.forced:
                        settings["forced_bos_token_id"] = choice.ids[name]
                    elif "target_language" in manifest.template.start:
                        settings["decoder_start_token_id"] = choice.ids[name]
                theirs_found = generated(theirs, sources, settings, eos_ids)
                for source, expected in zip(sources, theirs_found, strict=True):
                    message = pb.GenerateRequest(
                        sources=[pb.Source(token_ids=pb.TokenIds(values=source))],
                        options=pb.GenerateOptions(**options),
                    )
                    response = await served.stub.Generate(message)
                    num_ties += is_tie(response, expected, (case, number, settings, source))

    asyncio.run(run())
    assert num_ties <= num_sources // 50


def slow_unless(cases, *quick):
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


# Quick: of each kind of frame, position and layer one.
@pytest.mark.parametrize("case", slow_unless(TEXTS, "marian-separate", "bart", "t5"))
def test_a_checkpoint_answers_as_generate_does(case, imported):
    check_texts(case, imported(case), _NUM_SOURCES)


@pytest.mark.slow  # the export of several layers takes most of the time of a test
@pytest.mark.parametrize("case", ["bart", "t5gemma2"])
def test_a_checkpoint_of_several_layers_answers_as_generate_does(case, tmp_path):
    make_checkpoint(case, tmp_path / "checkpoint")
    check_texts(case, exported(tmp_path), _NUM_SOURCES)


# Settings of a checkpoint, and the tokens that its model writes most often, which they are about
RULES = {
    "bart": lambda often: {
        "eos_token_id": [2, often[0], often[3]],
        "begin_suppress_tokens": [often[1], 2],
        "suppress_tokens": [often[2]],
        "forced_eos_token_id": 2,
        "forced_bos_token_id": 0,
        "min_length": 4,
    },
    "marian-separate": lambda often: {
        "eos_token_id": [0, often[1]],
        "begin_suppress_tokens": [often[0]],
        "bad_words_ids": [[often[2]], [often[3]]],
        "forced_eos_token_id": often[1],
        "renormalize_logits": True,
    },
    "t5": lambda often: {
        "eos_token_id": [1, often[0]],
        "begin_suppress_tokens": often[1:3],
        "suppress_tokens": [often[3]],
        "bad_words_ids": [[1], [often[4]], *([one, other] for one in often for other in often[5:])],
        "min_length": 3,
    },
    "mbart50": lambda often: {
        "eos_token_id": [2, often[0]],
        "begin_suppress_tokens": [often[1]],
        "suppress_tokens": often[2:4],
        "bad_words_ids": [*([one, other] for one in often for other in often[:9]), [2, *often[4:6]]],
        "forced_eos_token_id": 2,
        "renormalize_logits": True,
    },
}


def written_often(model) -> list[int]:
    """The ids that it writes, the most frequent first."""
    found = model.generate(
        torch.arange(5, 65).view(20, 3),
        max_new_tokens=_MAX_NEW_TOKENS,
        no_repeat_ngram_size=1,
        use_cache=False,
    )
    counts = Counter(found[:, 2:].flatten().tolist())
    ends = {model.config.eos_token_id, model.config.pad_token_id}
    return [token_id for token_id, _ in counts.most_common() if token_id not in ends]


@pytest.mark.parametrize("case", slow_unless(RULES, "bart", "marian-separate"))
def test_the_rules_of_a_checkpoint_are_those_of_generate(case, quick_checkpoint, tmp_path):
    shutil.copytree(quick_checkpoint(case), tmp_path / "checkpoint")
    often = written_often(read_checkpoint(case, tmp_path / "checkpoint"))
    edit(tmp_path / "checkpoint" / "generation_config.json", **RULES[case](often))
    check_texts(case, exported(tmp_path), _NUM_SOURCES)


_NUM_NEW_TOKENS = 16  # of a sound, for several times
MEDIA_SEARCHES = [
    {},
    {"beam_size": 3, "early_stopping": True},
    {"no_repeat_ngram_size": 2},
    {"beam_size": 4, "length_penalty": 2.0, "early_stopping": False, "num_hypotheses": 2},
    {"beam_size": 2, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "early_stopping": True},
]


def searched(
    model, start: list[int], options: dict, processors: list | None = None, **sources: torch.Tensor
) -> Iterator[Expected]:
    """The answers of one pass over sounds or pictures.

    Whisper's own `generate` does more: it decodes a sound again from the last time that it wrote, and joins
    the segments.
    """
    [tensor] = sources.values()
    with torch.inference_mode():
        found = GenerationMixin.generate(
            model,
            **sources,
            decoder_input_ids=torch.tensor([start] * len(tensor)),
            max_new_tokens=_NUM_NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            logits_processor=processors,
            **options,
        )
    yield from read_rows(found, len(start), len(tensor), [model.generation_config.eos_token_id])


def transcribed(model, sound: np.ndarray, start: list[int], options: dict, *, has_times: bool) -> Expected:
    times = [WhisperTimeStampLogitsProcessor(model.generation_config, begin_index=len(start))]
    features = torch.tensor(sound)[None]
    [expected] = searched(model, start, options, times if has_times else [], input_features=features)
    return expected


def hearing(sound: np.ndarray, **options) -> pb.GenerateRequest:
    tensor = pb.Tensor(datatype="FP32", shape=sound.shape, data=sound.tobytes())
    return pb.GenerateRequest(
        sources=[pb.Source(tensor=tensor)],
        options=pb.GenerateOptions(max_new_tokens=_NUM_NEW_TOKENS, **options),
    )


def check_sounds(case: str, folder: Path, num_sounds: int) -> None:
    """Half of the sounds come one after the other, and all of them at once."""
    theirs = read_checkpoint(case, folder / "checkpoint")
    settings, rng, chance = theirs.generation_config, np.random.default_rng(0), random.Random(case)
    shape = theirs.config.num_mel_bins, 2 * theirs.config.max_source_positions
    off_id = settings.no_timestamps_token_id
    cases, num_ties, seen = [], 0, set()
    for number in range(num_sounds):
        sound = rng.uniform(-1, 1.5, shape).astype(np.float32)
        ours = MEDIA_SEARCHES[number % len(MEDIA_SEARCHES)]
        has_times, is_detected = number % 2 == 0, number % 3 == 0
        language, task = (
            chance.choice(sorted(settings.lang_to_id)),
            chance.choice(sorted(settings.task_to_id)),
        )
        if is_detected:
            (found,) = theirs.detect_language(torch.tensor(sound)[None]).tolist()
            language = next(name for name, token_id in settings.lang_to_id.items() if token_id == found)
        name = language.strip("<|>")
        seen.add((name, task, has_times, is_detected))
        start = [settings.decoder_start_token_id, settings.lang_to_id[language], settings.task_to_id[task]]
        if not has_times:
            start.append(off_id)
        expected = transcribed(theirs, sound, start, for_generate(ours), has_times=has_times)
        named = "" if is_detected else name
        message = hearing(sound, **ours, source_language=named, task=task, timestamps=has_times)
        cases.append((message, name if is_detected else "", expected))
    assert {name for name, *_ in seen} == {name.strip("<|>") for name in settings.lang_to_id}

    def check(number: int, message: pb.GenerateRequest, answer: pb.GenerateResponse) -> None:
        nonlocal num_ties
        _, language, expected = cases[number]
        where = (case, number, message.options)
        assert answer.detected_language == language, where
        assert all(bool(one.segments) <= message.options.timestamps for one in answer.hypotheses), where
        num_ties += is_tie(answer, expected, where)

    async def run() -> None:
        async with serving_bundles(folder / "bundle") as served:
            alone = [await served.stub.Generate(message) for message, *_ in cases[::2]]
            together = await asyncio.gather(*(served.stub.Generate(message) for message, *_ in cases))
        for number, answer in enumerate(together):
            check(number, cases[number][0], answer)
        for one, other in zip(alone, together[::2], strict=True):
            assert one.hypotheses == other.hypotheses

    asyncio.run(run())
    assert num_ties <= num_sounds // 50
    with_times = [targets for message, _, (targets, _) in cases if message.options.timestamps]
    times = [token_ids for targets in with_times for token_ids, _ in targets]
    assert all(target[0] > off_id for target in times)
    assert any(sum(token_id > off_id for token_id in target) > 3 for target in times)


def picture_files(num_pictures: int) -> list[Image.Image]:
    """Random shapes on random ground, of many sizes."""
    rng = np.random.default_rng(0)
    pictures = []
    for _ in range(num_pictures):
        width, height = (int(side) for side in rng.integers(8, 200, 2))
        picture = Image.new("RGB", (width, height), tuple(rng.integers(0, 256, 3).tolist()))
        for _ in range(4):
            corners = np.sort(rng.integers(0, [[width], [height]], (2, 2)))
            box = [tuple(corner) for corner in corners.T.tolist()]
            ImageDraw.Draw(picture).ellipse(box, fill=tuple(rng.integers(0, 256, 3).tolist()))
        pictures.append(picture)
    return pictures


def check_pictures(case: str, folder: Path, num_pictures: int) -> None:
    """Files, as the checkpoint's own image processor and `generate` read them."""
    theirs = read_checkpoint(case, folder / "checkpoint")
    processor = transformers.ViTImageProcessorPil.from_pretrained(folder / "checkpoint")
    start = [theirs.generation_config.decoder_start_token_id]
    num_ties = 0

    async def run() -> None:
        nonlocal num_ties
        async with serving_bundles(folder / "bundle") as served:
            messages, expected = [], []
            pictures = picture_files(num_pictures)
            for number in range(0, num_pictures, _BATCH):
                batch = pictures[number : number + _BATCH]
                ours = MEDIA_SEARCHES[number // _BATCH % len(MEDIA_SEARCHES)]
                pixels = processor(batch, return_tensors="pt").pixel_values
                expected += searched(theirs, start, for_generate(ours), pixel_values=pixels)
                for picture in batch:
                    content = io.BytesIO()
                    picture.save(content, "PNG")
                    messages.append(
                        pb.GenerateRequest(
                            sources=[pb.Source(file=content.getvalue())],
                            options=pb.GenerateOptions(max_new_tokens=_NUM_NEW_TOKENS, **ours),
                        )
                    )
            found = await asyncio.gather(*(served.stub.Generate(message) for message in messages))
            for together, message in zip(found[::3], messages[::3], strict=True):
                alone = await served.stub.Generate(message)
                assert alone.hypotheses == together.hypotheses
        for number, (answer, one) in enumerate(zip(found, expected, strict=True)):
            num_ties += is_tie(answer, one, (case, number, messages[number].options))
        assert len({tuple(answer.hypotheses[0].token_ids) for answer in found}) > num_pictures // 4

    asyncio.run(run())
    assert num_ties <= num_pictures // 50


@pytest.mark.parametrize("case", slow_unless(PICTURES, "trocr"))
def test_a_checkpoint_reads_what_generate_reads(case, imported):
    check_pictures(case, imported(case), _BATCH * len(MEDIA_SEARCHES))


@pytest.mark.parametrize("case", SOUNDS)
def test_a_checkpoint_hears_what_generate_hears(case, imported):
    check_sounds(case, imported(case), 16)
