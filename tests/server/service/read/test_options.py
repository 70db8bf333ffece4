import asyncio
import re
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from grpc.aio import AioRpcError

from seq2seq_serve.bundle.manifest import Choice, Generation, load_bundle, write_manifest
from seq2seq_serve.client import AsyncClient, ClientError, FieldViolation
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.options import OPTIONS
from seq2seq_serve.server.engine.request import Beam, Constraints, Sampling
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.service.read.options import (
    _REFUSALS,
    _check,
    _chosen,
    _near,
    _with_defaults,
    named_choice,
    without_ngrams,
)
from tests.server.service.harness import byte_tokenizer, serving, serving_bundles, with_manifest

TEXT = "sources[0].text"
IDS = "sources[0].token_ids"


def from_text(text, **options):
    return pb.GenerateRequest(sources=[pb.Source(text=text)], options=pb.GenerateOptions(**options))


def target(**value):
    return pb.Target(**value)


def ids(*values):
    return pb.TokenIds(values=values)


def term(source, target):
    return pb.Term(source=source, target=target)


BAD_OPTIONS = [  # of each rule one value, and of bounds the nearest beyond
    ({"max_new_tokens": 0}, "max_new_tokens", "max_new_tokens is 0, and echo takes 1 to 64"),
    ({"max_new_tokens": 65}, "max_new_tokens", "max_new_tokens is 65"),
    ({"min_new_tokens": -1}, "min_new_tokens", "min_new_tokens is -1, and must be from 0 to 64"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "repetition_penalty is 0, and must be from 0.01"),
    ({"temperature": float("nan")}, "temperature", "temperature is nan"),
    ({"logit_bias": {7: float("inf")}}, "logit_bias", "logit_bias is inf, and must be from -1000 to 1000"),
    ({"logit_bias": {-1: 2.0}}, "logit_bias[0]", "token id -1 is outside"),
    ({"seed": 0}, "seed", "seed needs a temperature above 0"),
    ({"temperature": 1.0, "top_p": 1.5}, "top_p", "top_p is 1.5, and must be from 1e-06 to 1"),
    ({"num_alternatives": 33}, "num_alternatives", "num_alternatives is 33, and must be from 0 to 32"),
    (
        {"terms": [term("a", "b")], "temperature": 1.0},
        "terms",
        "terms needs a beam search, and a temperature",
    ),
    (
        {"keep_placeholders": True, "temperature": 1.0},
        "keep_placeholders",
        "keep_placeholders needs a beam search",
    ),
    ({"terms": [term("a", "b")] * 1001}, "terms", "the number of terms is 1001, and must be from 0 to 1000"),
    ({"terms": [term("b", "b"), term("a", " ")]}, "terms[1].target", "the target of term 2 has 1 characters"),
    ({"terms": [term("", "b")]}, "terms[0].source", "the source of term 1 has 0 characters: send 1 to 256"),
    ({"terms": [term("a", "b" * 257)]}, "terms[0].target", "the target of term 1 has 257 characters"),
    (
        {"terms": [term("a", "b"), term("A", "c")]},
        "terms[1].target",
        "the term 'A' has two translations, 'b'",
    ),
    ({"terms": [term("a", "b" * 65)]}, "", "what the target has to have takes 66 tokens"),
    (
        {"terms": [term("a", "bcd")], "max_new_tokens": 2},
        "",
        "what the target has to have takes 4 tokens",
    ),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences", "the number of stop_sequences is 17, and must be"),
    ({"stop_sequences": ["b", ""]}, "stop_sequences[1]", "the length of stop_sequences[1] is 0, and must"),
    ({"suppressed_token_ids": range(260)}, "suppressed_token_ids", "every token is suppressed: leave"),
    ({"suppressed_token_ids": [5] * 1025}, "suppressed_token_ids", "the number of suppressed_token_ids is"),
    ({"suppressed_token_ids": [5, 260]}, "suppressed_token_ids[1]", "token id 260 is outside the vocabulary"),
    ({"beam_size": 5}, "beam_size", "beam_size is 5, and must be from 1 to 4"),
    ({"num_hypotheses": 5}, "num_hypotheses", "num_hypotheses is 5, and must be from 1 to 4"),
    ({"length_penalty": 1.0}, "length_penalty", "length_penalty needs a beam_size above 1"),
    # Once INTERNAL, with a traceback in the log.
    (
        {"beam_size": 2, "length_penalty_formula": 99},
        "length_penalty_formula",
        "length_penalty_formula is 99",
    ),
    ({"target_prefix": target(text="x" * 64)}, "target_prefix", "the given target has 64 tokens, and echo"),
    (
        {"target_prefix": target(text="x" * 60), "max_new_tokens": 5},
        "max_new_tokens",
        "max_new_tokens is 5, and echo takes 1 to 4",
    ),
    ({"target_prefix": target(token_ids=ids(5, 2))}, "target_prefix", "the given target contains the end of"),
    (
        {"target_prefix": target(token_ids=ids(5, 400))},
        "target_prefix.token_ids.values[1]",
        "token id 400 is outside the vocabulary",
    ),
]
BAD_SOURCES = [
    ([pb.Source(text="")], TEXT, "the text is empty"),
    ([pb.Source(text="\u200b\ufeff \u200d")], TEXT, "the text has only white space and invisible"),
    ([pb.Source(text="x" * 64)], TEXT, "the source has 65 tokens, and echo takes at most 64"),
    ([pb.Source(text="가" * 400_000)], TEXT, "the text has 1200000 bytes, and echo takes at most 64 tokens"),
    ([pb.Source(token_ids=ids(50, 0, 2))], f"{IDS}.values[1]", "token id 0 is padding, which echo does not"),
    ([pb.Source(token_ids=ids())], IDS, "the source has no token ids"),
    (
        [pb.Source(token_ids=ids(5, 260))],
        f"{IDS}.values[1]",
        "token id 260 is outside the vocabulary of echo",
    ),
    ([pb.Source(token_ids=ids(-1))], f"{IDS}.values[0]", "token id -1 is outside"),
    ([pb.Source(token_ids=ids(*[5] * 65))], IDS, "the source has 65 tokens"),
    ([], "sources", "the request has 0 sources, and echo takes exactly 1"),
    ([pb.Source()], "sources[0]", "the source source_ids is empty, and echo reads text"),
    (
        [pb.Source(name="image", text="a")],
        "sources[0].name",
        "echo has no source named 'image': its only one",
    ),
]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_bad_request_is_refused_with_its_field_and_reaches_no_engine(method, caplog):
    cases = [
        (from_text("a", **options), f"options.{field}".removesuffix("."), text)
        for options, field, text in BAD_OPTIONS
    ]
    cases += [(pb.GenerateRequest(sources=sources), field, text) for sources, field, text in BAD_SOURCES]
    async with serving() as served:
        for request, field, message in cases:
            call = getattr(served.stub, method)(request)
            with pytest.raises(AioRpcError) as caught:
                await (call if method == "Generate" else anext(aiter(call)))
            error = ClientError.from_rpc(caught.value, served.address)
            assert error.code == "INVALID_ARGUMENT"
            assert error.message.startswith(message)
            assert error.field_violations == (FieldViolation(field, error.message),)
            assert error.request_id
        assert served.turns.num_submitted == 0
        labels = {"model_name": "echo", "method": method, "code": "INVALID_ARGUMENT"}
        assert served.metric("seq2seq_requests_total", **labels) == len(cases)
    assert caplog.text == ""


async def test_the_bounds_of_an_option_are_accepted_although_float32_rounds_them():
    """A temperature of 0.01 was refused: it must be from 0.01 to 100."""
    async with serving() as served, AsyncClient(served.address) as client:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "length_penalty"):
            for bound in OPTIONS[name].bounds:
                options = pb.GenerateOptions(**{name: bound})
                if OPTIONS[name].needs:
                    setattr(options, OPTIONS[name].needs, 2)
                await client.generate("a", options=options)


async def test_the_options_reach_the_engine_as_its_records():
    async with serving() as served:
        served.runner.gate.clear()
        options = {
            "min_new_tokens": 2,
            "repetition_penalty": 1.5,
            "no_repeat_ngram_size": 3,
            "suppressed_token_ids": [7, 8],
            "logit_bias": {9: -0.5},
            "temperature": 0.5,
            "top_k": 4,
            "top_p": 0.75,
            "min_p": 0.25,
            "seed": 2**64 - 1,
            "log_probabilities": True,
            "num_alternatives": 5,
            "target_prefix": pb.Target(text="ab"),
            "num_hypotheses": 2,
        }
        beam = {"priority": 3, "beam_size": 3, "num_hypotheses": 2, "early_stopping": False}
        calls = [
            asyncio.ensure_future(_result(served.stub.Generate(from_text("a", **given))))
            for given in (options, {"priority": 1}, {"priority": 2, "temperature": 2.0}, beam)
        ]
        await served.turns.until(lambda: served.turns.num_submitted == 4)
        requests = served.turns.requests
        full, plain, sampled, searched = sorted(requests, key=lambda request: request.priority)
        assert full.constraints == Constraints(2, 1.5, 3, frozenset({7, 8}), {9: -0.5})
        assert full.sampling == Sampling(0.5, 4, 0.75, 0.25, 2**64 - 1)
        assert (full.log_probabilities, full.num_alternatives) == (True, 5)
        assert full.prefix_ids == tuple(served.model.target_tokenizer.encode("ab"))
        assert full.max_new_tokens == 62
        assert (full.beam, full.num_hypotheses) == (None, 2)
        assert (searched.beam, searched.num_hypotheses) == (Beam(3, 0.6, early_stopping=False), 2)
        assert plain.is_plain
        assert sampled.sampling.top_p == 1
        assert sampled.sampling.top_k == sampled.sampling.min_p == 0
        assert not sampled.is_plain
        served.runner.gate.set()
        await asyncio.gather(*calls)


async def _result(call):
    return await call


async def test_the_longest_source_and_target_that_fit_are_served():
    async with serving() as served, AsyncClient(served.address) as client:
        options = pb.GenerateOptions(max_new_tokens=64)
        assert await client.translate("x" * 63, options=options) == "x" * 63


async def test_texts_are_normalised_on_every_way_in_and_stop_sequences_as_targets_are():
    decomposed = unicodedata.normalize("NFD", "한글")
    async with serving() as served:
        tokenizer = byte_tokenizer("nfc")
        model = with_manifest(served.model, tokenizer)
        served.app.models.put(model)

        async def generated(text, **options) -> str:
            answer = await served.stub.Generate(from_text(text, **options))
            return answer.hypotheses[0].text

        assert await generated(f" \ufeff{decomposed}\u00a0a") == "한글 a"
        assert await generated("한글 a", stop_sequences=[f" {decomposed}", " a"]) == "한글"
        assert (await generated("abcd", target_prefix=pb.Target(text=decomposed[:2])))[0] == "하"
        split = pb.LONG_SOURCE_SPLIT_ALWAYS
        assert await generated(f"{decomposed}.\u3000a.\n\nb", long_source=split) == "한글.\u3000a.\n\nb"
        for stop in ("\n", "a\tb", "a  b", "\u200b"):
            with pytest.raises(AioRpcError, match="which echo never writes: between words") as caught:
                await generated("a", stop_sequences=["b", stop])
            assert caught.value.details().startswith(f"stop_sequences[1] is {stop!r}")


FAMILIES = {
    "mbart": ["ko_KR", "en_XX", "pt_XX", "zh_CN"],
    "m2m100": ["ko", "en", "zh"],
    "nllb": ["kor_Hang", "eng_Latn", "zho_Hans", "zho_Hant", "kon_Latn"],
}


def chosen(family, given):
    ids = {name: i for i, name in enumerate(FAMILIES[family])}
    manifest = SimpleNamespace(choices={"target_language": Choice(ids)})
    model = SimpleNamespace(name=family, manifest=manifest)
    number = _chosen(pb.GenerateOptions(target_language=given), model)["target_language"]
    return FAMILIES[family][number]


@pytest.mark.parametrize(
    ("family", "given", "name"),
    [
        ("mbart", "ko_KR", "ko_KR"),
        ("mbart", "ko-kr", "ko_KR"),
        ("mbart", "ko", "ko_KR"),
        ("m2m100", "ko", "ko"),
        ("m2m100", "ko-KR", "ko"),
        ("m2m100", "zh_Hant_TW", "zh"),
        ("nllb", "kor-hang", "kor_Hang"),
        ("nllb", "eng", "eng_Latn"),
        ("nllb", "ko", "kor_Hang"),
        ("nllb", "kg", "kon_Latn"),
        ("nllb", "zho", "zho_Hans"),
        ("nllb", "zh-TW", "zho_Hant"),
        ("m2m100", "kor_Hang", "ko"),
    ],
)
def test_a_language_is_found_by_its_tag(family, given, name):
    assert chosen(family, given) == name


@pytest.mark.parametrize(
    ("family", "given", "near"),
    [
        ("mbart", "zh-TW", " (near it: zh_CN)"),
        ("mbart", "de", ""),
        ("nllb", "zho_Latn", " (near it: zho_Hans, zho_Hant)"),
    ],
)
def test_a_language_that_is_not_clear_is_refused_with_those_near_it(family, given, near):
    names = ", ".join(sorted(FAMILIES[family]))
    message = f"target_language is '{given}'{near}, and {family} has {names}"
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}$"):
        chosen(family, given)


@pytest.mark.parametrize(
    ("own", "given", "is_taken"),
    [
        ("en", "en", True),
        ("en", "en-US", True),
        ("en", "English", True),
        ("en", "eng_Latn", True),
        ("en", "de", False),
        ("", "de", True),
        ("mul", "de", True),
        ("zh-Hans", "zh-Hant", False),
    ],
)
@pytest.mark.parametrize("name", ["source_language", "target_language"])
def test_a_model_without_a_choice_takes_its_own_language(name, own, given, is_taken):
    """Its own target language was refused, and any source language was taken."""
    manifest = SimpleNamespace(choices={}, source_language=own, target_language=own)
    model = SimpleNamespace(name="m", manifest=manifest, reads_sound=False, reads_text=True)
    options = pb.GenerateOptions(**{name: given})
    if is_taken:
        assert _chosen(options, model) == {}
        return
    with pytest.raises(
        InvalidRequest, match=f"^{name} is '{given}', and m has only {own}: leave it out"
    ) as caught:
        _chosen(options, model)
    assert caught.value.field == f"options.{name}"


def test_a_long_tag_is_refused_before_it_is_split():
    """Each of a million parts was compared with every name: hours on the event loop."""
    tag = "q-" * 1_000_000
    with pytest.raises(InvalidRequest, match=r"^target_language has 2000000 characters"):
        chosen("nllb", tag)
    assert named_choice(tag, Choice({"ko": 0, "en": 1})) is None
    assert named_choice("q-" * 50, Choice({"ko": 0, "q": 1})) == "q"


def test_names_near_none_or_many_are_not_all_listed():
    """A tag that begins with a hyphen was near every name."""
    choice = Choice({f"ko_{number:02}": number for number in range(30)})
    for given in ("-", "_", "", "-ko"):
        assert _near(given, choice) == []
    assert _near("k", choice) == [f"ko_{number:02}" for number in range(10)]


DEFAULTS = {
    "min_new_tokens": 4,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 2,
    "repetition_penalty": 1.5,
}
NEUTRAL = dict.fromkeys(DEFAULTS, 0) | {"repetition_penalty": 1.0}


@pytest.mark.parametrize(("given", "expected"), [({}, DEFAULTS), (NEUTRAL, NEUTRAL)])
def test_a_neutral_value_turns_off_what_the_model_does_by_default(given, expected):
    model = SimpleNamespace(manifest=SimpleNamespace(generation=Generation(**DEFAULTS)))
    options = _with_defaults(pb.GenerateOptions(**given), model)
    assert {name: getattr(options, name) for name in DEFAULTS} == pytest.approx(expected)


SPLIT = {"long_source": pb.LONG_SOURCE_SPLIT}
REFUSED = {
    "num_hypotheses": ({"beam_size": 2}, 3, "num_hypotheses is 3, and a beam of size 2"),
    "temperature": ({"beam_size": 2}, 1.0, "beam_size and temperature are both set"),
    "timestamps": ({}, True, "pictures does not write timestamps"),
    "voice_activity": ({}, True, "for sounds, and pictures reads picture"),
    "word_timestamps": ({}, True, "does not report the attention of single heads"),
    "attention": ({}, True, "pictures is a model without attention"),
    "word_alignment": ({}, True, "pictures is a model without attention"),
    "long_source": ({}, pb.LONG_SOURCE_TRUNCATE, "a text or a sound, and pictures reads picture"),
    "encoder_no_repeat_ngram_size": ({}, 2, "applies to a text, which pictures does not read"),
    "terms": ({}, [term("a", "b")], "terms applies to a text, and pictures reads picture"),
    "keep_placeholders": ({}, True, "keep_placeholders applies to a text"),
    "prompt": ({}, "a", "a prompt is for sounds"),
    "compression_ratio_threshold": (SPLIT, 2.0, "a compression_ratio_threshold is for sounds"),
    "log_probability_threshold": (SPLIT, -2.0, "a log_probability_threshold is for sounds"),
    "no_speech_threshold": (SPLIT, 0.5, "a no_speech_threshold is for sounds"),
    "stop_sequences": (SPLIT, ["a"], "stop_sequences applies to one target"),
    "target_prefix": (SPLIT, pb.Target(text="a"), "target_prefix applies to one target"),
}


@pytest.mark.parametrize("name", dict.fromkeys(name for name, *_ in _REFUSALS))
def test_an_option_that_does_not_go_with_the_model_or_with_others_is_refused(name):
    others, value, message = REFUSED[name]
    model = SimpleNamespace(
        name="pictures",
        sources={"picture": None},
        reads_text="long_source" in others,
        reads_sound=False,
        manifest=SimpleNamespace(timestamps=None),
        sizing=SimpleNamespace(num_hops=0, num_alignment_heads=0, num_slots=4, vocab_size=100),
        max_target_length=64,
    )
    with pytest.raises(InvalidRequest, match=message) as caught:
        _check(pb.GenerateOptions(**others, **{name: value}), model, 64)
    assert caught.value.field == f"options.{name}"
    _check(pb.GenerateOptions(**others), model, 64)


async def test_a_lower_limit_lowers_the_minimum_of_the_model(bundle_path, tmp_path):
    """As in `generate`; the minimum of a request itself is refused."""
    folder = Path(shutil.copytree(bundle_path, tmp_path / "long"))
    manifest = load_bundle(folder).manifest
    write_manifest(folder, replace(manifest, generation=replace(manifest.generation, min_new_tokens=6)))
    source = pb.Source(token_ids=pb.TokenIds(values=[10, 11, 12]))
    async with serving_bundles(folder) as served:

        def generate(**options):
            message = pb.GenerateRequest(sources=[source], options=pb.GenerateOptions(**options))
            return served.stub.Generate(message)

        answer = await generate(max_new_tokens=2)
        assert len(answer.hypotheses[0].token_ids) == 2
        assert len((await generate()).hypotheses[0].token_ids) >= 6
        with pytest.raises(AioRpcError) as caught:
            await generate(max_new_tokens=2, min_new_tokens=6)
        assert caught.value.details() == "min_new_tokens is 6, and must be from 0 to 2"


LIMIT = 12


@pytest.fixture
def forcing_path(bundle_path, tmp_path) -> Path:
    """A model that writes the token of the target language first, as NLLB does, and takes few tokens."""
    folder = Path(shutil.copytree(bundle_path, tmp_path / "forcing"))
    manifest = load_bundle(folder).manifest
    write_manifest(
        folder,
        replace(
            manifest,
            max_target_length=LIMIT,
            template=replace(manifest.template, forced=("target_language",)),
            choices={"target_language": Choice({"en": 7})},
        ),
    )
    return folder


async def test_the_ids_of_an_answer_are_a_target_and_a_prefix(forcing_path):
    """They begin with the forced token, which is not added again."""
    source = pb.Source(token_ids=pb.TokenIds(values=[10, 11, 12]))
    async with serving_bundles(forcing_path) as served:

        def generate(**options):
            options = pb.GenerateOptions(target_language="en", max_new_tokens=5, **options)
            return served.stub.Generate(pb.GenerateRequest(sources=[source], options=options))

        def score(token_ids):
            target = pb.Target(token_ids=pb.TokenIds(values=token_ids))
            return served.stub.Score(pb.ScoreRequest(sources=[source], target=target, target_language="en"))

        answer = (await generate()).hypotheses[0]
        assert answer.token_ids[0] == 7
        whole, rest = await asyncio.gather(score(answer.token_ids), score(answer.token_ids[1:]))
        assert whole.log_probabilities == rest.log_probabilities
        assert len(whole.log_probabilities) == len(answer.token_ids) + 1
        begun = pb.Target(token_ids=pb.TokenIds(values=answer.token_ids[:3]))
        continued = (await generate(target_prefix=begun)).hypotheses[0]
        assert continued.token_ids[:5] == answer.token_ids


async def test_the_longest_given_target_leaves_room_for_the_forced_tokens(forcing_path):
    """The step after it needed a position beyond the cache, and its neighbours failed with it."""
    source = pb.Source(token_ids=pb.TokenIds(values=[10, 11, 12]))
    longest, too_long = (
        pb.Target(token_ids=pb.TokenIds(values=[9] * num_tokens)) for num_tokens in (LIMIT - 2, LIMIT - 1)
    )

    def generate(prefix=None, **options):
        options = pb.GenerateOptions(target_language="en", target_prefix=prefix, **options)
        return pb.GenerateRequest(sources=[source], options=options)

    def score(target):
        return pb.ScoreRequest(sources=[source], target=target, target_language="en")

    async with serving_bundles(forcing_path) as served:
        stub = served.stub
        alone = await stub.Generate(generate())
        prefixed, scored, beside = await asyncio.gather(
            stub.Generate(generate(longest)), stub.Score(score(longest)), stub.Generate(generate())
        )
        assert prefixed.hypotheses[0].token_ids[: LIMIT - 1] == [7, *longest.token_ids.values]
        assert len(scored.log_probabilities) == LIMIT
        assert beside.hypotheses[0].token_ids == alone.hypotheses[0].token_ids
        for call, field in (
            (stub.Generate(generate(too_long)), "options.target_prefix"),
            (stub.Generate(generate(too_long, max_new_tokens=1)), "options.target_prefix"),
            (stub.Score(score(too_long)), "target"),
        ):
            with pytest.raises(AioRpcError) as caught:
                await call
            error = ClientError.from_rpc(caught.value, served.address)
            [violation] = error.field_violations
            assert violation.field == field
            assert "11 tokens" in violation.description


def test_the_ngrams_of_a_source_are_forbidden_beside_the_sequences_of_the_model():
    given = Constraints(forbidden_after={(5,): frozenset({6})})
    found = without_ngrams(given, 2, np.array([5, 7, 8]))
    assert found.forbidden_after == {(5,): {6, 7}, (7,): {8}}
    assert given.forbidden_after == {(5,): {6}}


async def test_a_text_may_name_the_language_of_its_target(bundle_path, tmp_path):
    """As it does for Marian's own tokenizer (`tests/export/huggingface/test_tokenizers.py` has the ids)."""
    folder = Path(shutil.copytree(bundle_path, tmp_path / "marked"))
    manifest = load_bundle(folder).manifest
    template = replace(manifest.template, source_prefix=("target_language",))
    choices = {"target_language": Choice({"en": 7, "fr": 8})}
    write_manifest(folder, replace(manifest, template=template, choices=choices))
    async with serving_bundles(folder) as served:

        async def generated(text, **options):
            options = pb.GenerateOptions(max_new_tokens=5, log_probabilities=True, **options)
            message = pb.GenerateRequest(sources=[pb.Source(text=text)], options=options)
            answer = await served.stub.Generate(message)
            return list(answer.hypotheses[0].log_probabilities), answer.usage.source_tokens

        async def scored(text, **options):
            message = pb.ScoreRequest(sources=[pb.Source(text=text)], target=pb.Target(text="a"), **options)
            return (await served.stub.Score(message)).score

        for ask in (generated, scored):
            english, french = [await ask("오늘", target_language=name) for name in ("en", "fr")]
            assert [await ask(f">>{name}<<오늘") for name in ("en", "fr")] == [english, french]
            assert english != french
            as_text = await ask(">>fr<<오늘", target_language="en")
            assert as_text not in (english, french), "an option was given, so that the mark is text"
            for text in ("오늘", ">>de<<오늘", ">>"):
                with pytest.raises(AioRpcError, match="or a text that begins with it, such as >>en<<"):
                    await ask(text)
        split = await generated(">>fr<<오늘. 오늘.", long_source=pb.LONG_SOURCE_SPLIT_ALWAYS)
        whole = await generated("오늘. 오늘.", target_language="fr", long_source=pb.LONG_SOURCE_SPLIT_ALWAYS)
        assert split == whole
