"""Sounds through `seq2seq.v1`: files and spectrograms, long ones, languages, tasks, times."""

import random

import numpy as np
import pytest
import torch
import transformers
from grpc import StatusCode
from grpc.aio import AioRpcError

from seq2seq_serve.bundle.audio import SAMPLE_RATE, joined_spans, log_mel, pieces_of, read_sound, split_sound
from seq2seq_serve.client import ClientError
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import FinishReason, Hypothesis
from seq2seq_serve.server.runner import voice_activity
from seq2seq_serve.server.runner.voice_activity import SpeechRules, speech
from seq2seq_serve.server.service.read.sources import Reading
from seq2seq_serve.server.service.seq2seq import windows
from seq2seq_serve.server.service.write import responses as answers
from tests.bundle.test_audio import encoded
from tests.server.runner.test_voice_activity import needs_model, quiet, vowels
from tests.server.service.harness import serving_bundles
from tests.server.service.seq2seq.test_windows import ANYTHING_IS_GOOD

SECONDS, NUM_MELS, NUM_FRAMES, NUM_POSITIONS = 0.64, 12, 64, 32
LONGEST = int(SECONDS * SAMPLE_RATE)


def noise(num_samples: int, seed: int = 0, num_channels: int = 1) -> np.ndarray:
    """With pauses, so that a long one is cut there."""
    samples = 0.2 * np.random.default_rng(seed).standard_normal((num_samples, num_channels))
    loudness = np.sin(np.arange(num_samples) / 1_500) ** 2
    return samples * loudness[:, None]


def spectrogram(samples: np.ndarray) -> np.ndarray:
    return log_mel(samples, NUM_MELS, NUM_FRAMES)


def tensor(array: np.ndarray, **changes) -> pb.Tensor:
    fields = {"datatype": "FP32", "shape": array.shape, "data": array.astype("<f4").tobytes()}
    return pb.Tensor(**fields | changes)


def message(value: bytes | pb.Tensor, **options) -> pb.GenerateRequest:
    source = pb.Source(file=value) if isinstance(value, bytes) else pb.Source(tensor=value)
    settings = {"max_new_tokens": 12, "source_language": "ko"} | options
    return pb.GenerateRequest(sources=[source], options=pb.GenerateOptions(**settings))


async def refusal(call) -> str:
    with pytest.raises(AioRpcError) as caught:
        await call
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
    return caught.value.details()


@pytest.mark.parametrize(
    ("form", "rate", "num_channels"),
    [("WAV", 16_000, 1), ("WAV", 44_100, 2), ("FLAC", 8_000, 1), ("FLAC", 48_000, 2)],
)
async def test_a_file_is_answered_as_its_spectrogram(whisper_path, form, rate, num_channels):
    content = encoded(noise(int(0.6 * rate), num_channels=num_channels), rate, form)
    samples = read_sound(content, SECONDS)
    async with serving_bundles(whisper_path / "bundle") as served:
        for options in ({}, {"beam_size": 3, "source_language": "", "timestamps": True}):
            heard = await served.stub.Generate(message(content, **options))
            given = await served.stub.Generate(message(tensor(spectrogram(samples)), **options))
            assert heard.hypotheses[0].token_ids == given.hypotheses[0].token_ids
            assert heard.hypotheses[0].token_ids
            assert heard.usage.source_tokens == NUM_POSITIONS
            assert heard.detected_language == given.detected_language


async def test_a_model_says_what_it_hears_and_what_one_may_choose(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        [model] = (await served.stub.ListModels(pb.ListModelsRequest())).models
        assert dict(model.sources) == {"sound": "sound"}
        assert list(model.source_shapes["sound"].sizes) == [NUM_MELS, NUM_FRAMES]
        assert (model.max_source_length, model.max_target_length) == (NUM_POSITIONS, 37)
        chosen = {name: (list(one.names), one.default) for name, one in model.choices.items()}
        assert chosen == {
            "source_language": (["de", "en", "ko"], ""),
            "task": (["transcribe", "translate"], "transcribe"),
        }


GOOD = np.zeros((NUM_MELS, NUM_FRAMES), np.float32)


async def test_a_sound_or_an_option_that_does_not_fit_is_refused_with_the_reason(whisper_path):
    good = tensor(GOOD)
    long, split = "sound: the sound has 1.00 seconds, and 0.64 is the limit: send", pb.LONG_SOURCE_SPLIT
    async with serving_bundles(whisper_path / "bundle") as served:
        for value, options, expected in (
            (tensor(GOOD[:, :-1]), {}, "sound has the shape [12, 63], and bundle takes [12, 64]"),
            (tensor(GOOD, datatype="INT64"), {}, "sound has the datatype 'INT64', and bundle takes FP32"),
            (tensor(np.full_like(GOOD, np.nan)), {}, "sound is nan at [0, 0], and must be from -65504 to"),
            (b"not a sound", {}, "sound: the file is not a WAV, AIFF"),
            (encoded(np.full(99, np.nan), subtype="FLOAT"), {}, "sound: the sound has samples that are not"),
            (encoded(noise(SAMPLE_RATE)), {}, long),
            (good, {"source_language": "fr"}, "source_language is 'fr', and bundle has de, en, ko"),
            (good, {"target_language": "de"}, "bundle does not have a target_language to choose"),
            (good, {"word_alignment": True}, "word_alignment needs the words of a text, and bundle reads"),
            (good, {"max_new_tokens": 38}, "max_new_tokens is 38, and bundle takes 1 to 37"),
            (good, {"long_source": split, "stop_sequences": ["a"]}, "stop_sequences applies to one target"),
        ):
            details = await refusal(served.stub.Generate(message(value, **options)))
            assert details.startswith(expected), details


async def test_a_long_sound_is_truncated_only_when_asked_and_the_answer_says_how_much(whisper_path):
    samples = noise(SAMPLE_RATE)
    beginning = read_sound(encoded(samples[:LONGEST]), SECONDS)
    async with serving_bundles(whisper_path / "bundle") as served:
        request = message(encoded(samples), long_source=pb.LONG_SOURCE_TRUNCATE)
        truncated = await served.stub.Generate(request)
        whole = await served.stub.Generate(message(tensor(spectrogram(beginning))))
        assert truncated.hypotheses == whole.hypotheses
        assert truncated.usage.truncated_source_tokens == 18  # 0.36 of 0.64 seconds, of 32 positions
        assert not truncated.sentences
        assert whole.usage.truncated_source_tokens == 0
        request = message(encoded(np.zeros(17 * LONGEST)), long_source=pb.LONG_SOURCE_TRUNCATE)
        details = await refusal(served.stub.Generate(request))
        assert details.startswith("sound: the sound has 10.88 seconds, and 10.24 is the limit")


@pytest.fixture
def one_window(monkeypatch):
    """Each piece of a sound is decoded once: what follows its last time is too short for another window."""
    monkeypatch.setattr(windows, "_LEAST_SHARE", 0.5)


@pytest.mark.parametrize("kind", [pb.LONG_SOURCE_SPLIT, pb.LONG_SOURCE_SPLIT_ALWAYS])
async def test_a_long_sound_is_split_and_its_targets_and_times_are_joined(whisper_path, kind, one_window):
    content = encoded(noise(2 * SAMPLE_RATE))
    pieces = split_sound(read_sound(content, 9), LONGEST)
    async with serving_bundles(whisper_path / "bundle") as served:
        given = {"long_source": kind, "timestamps": True} | ANYTHING_IS_GOOD
        joined = await served.stub.Generate(message(content, **given))
        alone = [
            await served.stub.Generate(message(tensor(spectrogram(piece)), timestamps=True))
            for piece in pieces
        ]
        best = [one.hypotheses[0] for one in alone]
        assert [one.hypotheses[0].token_ids for one in joined.sentences] == [one.token_ids for one in best]
        assert [one.source_text for one in joined.sentences] == [""] * len(pieces)
        [hypothesis] = joined.hypotheses
        assert hypothesis.text == "".join(one.text for one in best)
        assert list(hypothesis.token_ids) == [i for one in best for i in one.token_ids]
        expected, begin = [], 0.0
        for one, piece in zip(best, pieces, strict=True):
            end = len(piece) / SAMPLE_RATE
            expected += [
                (begin + min(each.begin_seconds, end), begin + min(each.end_seconds, end), each.text)
                for each in one.segments
            ]
            begin += end
        found = [(each.begin_seconds, each.end_seconds, each.text) for each in hypothesis.segments]
        assert len(found) > 3
        assert [text for *_, text in found] == [text for *_, text in expected]
        np.testing.assert_allclose([each[:2] for each in found], [each[:2] for each in expected], atol=1e-9)
        times = [time for *each, _ in found for time in each]
        assert np.diff(times).min() > -1e-9
        assert times[-1] <= 2
        assert joined.usage.source_tokens == NUM_POSITIONS * len(pieces)


@needs_model
async def test_voice_activity_cuts_between_speech_and_times_stay_those_of_the_sound(whisper_path, one_window):
    samples = np.concatenate([quiet(2), vowels(0), quiet(3), vowels(0), quiet(1)])
    content = encoded(samples)
    heard = read_sound(content, 99)
    spans = speech(heard, SpeechRules(0.16))
    joined, places, _ = joined_spans(heard, spans)
    pieces = pieces_of(joined, places, LONGEST)
    async with serving_bundles(whisper_path / "bundle") as served:
        given = {"voice_activity": True, "word_timestamps": True} | ANYTHING_IS_GOOD
        answer = await served.stub.Generate(message(content, long_source=pb.LONG_SOURCE_SPLIT, **given))
        assert answer.usage.source_seconds == pytest.approx(len(samples) / SAMPLE_RATE)
        assert len(answer.sentences) == len(pieces) < len(samples) / LONGEST
        for sentence, (begin, end) in zip(answer.sentences, pieces, strict=True):
            alone = await served.stub.Generate(
                message(tensor(spectrogram(joined[begin:end])), timestamps=True)
            )
            assert sentence.hypotheses[0].token_ids == alone.hypotheses[0].token_ids
        windows = await served.stub.Generate(message(content, long_source=pb.LONG_SOURCE_SEQUENTIAL, **given))
        assert windows.usage.source_seconds == answer.usage.source_seconds
        for one, kept in ((answer, spans), (windows, speech(heard, SpeechRules(2.0)))):
            segments = one.hypotheses[0].segments
            words = [word for segment in segments for word in segment.words]
            for begin, end in [(each.begin_seconds, each.end_seconds) for each in words]:
                assert any(
                    first <= begin * SAMPLE_RATE + 1 and end * SAMPLE_RATE - 1 <= after
                    for first, after in kept
                )
            for times in (
                [each.begin_seconds for each in segments],
                [each.begin_seconds for each in words],
            ):
                assert times == sorted(times)
                assert len(times) > 5
            assert segments[0].window.begin_seconds == pytest.approx(kept[0][0] / SAMPLE_RATE)


@needs_model
@pytest.mark.parametrize(
    "long_source", [pb.LONG_SOURCE_SPLIT, pb.LONG_SOURCE_SEQUENTIAL, pb.LONG_SOURCE_TRUNCATE]
)
async def test_silence_has_no_text_with_voice_activity(whisper_path, long_source):
    async with serving_bundles(whisper_path / "bundle") as served:
        content = encoded(quiet(3))
        request = message(
            content, long_source=long_source, voice_activity=True, word_timestamps=True, min_new_tokens=3
        )
        answer = await served.stub.Generate(request)
        assert answer.hypotheses[0].text == ""
        assert not answer.hypotheses[0].segments
        request = message(content, long_source=long_source, min_new_tokens=3)
        assert (await served.stub.Generate(request)).hypotheses[0].token_ids


async def test_voice_activity_needs_samples_and_the_file_of_the_model(whisper_path, monkeypatch):
    async with serving_bundles(whisper_path / "bundle") as served:
        with pytest.raises(AioRpcError) as caught:
            await served.stub.Generate(message(tensor(spectrogram(quiet(0.1))), voice_activity=True))
        error = ClientError.from_rpc(caught.value, "")
        assert error.message.startswith("voice_activity needs a sound file")
        assert error.is_about_the_text
        monkeypatch.setattr(voice_activity, "_FILES", ())
        voice_activity._session.cache_clear()
        details = await refusal(served.stub.Generate(message(encoded(quiet(0.1)), voice_activity=True)))
        assert details.startswith("the server cannot detect speech")
        voice_activity._session.cache_clear()


async def test_segments_are_what_was_said_between_times(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        model = served.model
        first, encode, decode = (
            model.manifest.timestamps.first_id,
            model.target_tokenizer.encode,
            model.target_tokenizer.decode,
        )
        one, other = encode(" one"), encode(" other")
        reading = Reading(Request("", {}, 0, 1, 0.0), begin_seconds=10.0, num_seconds=0.6, sound_seconds=10.6)
        for token_ids, expected in (
            ([], []),
            ([first + 5], []),
            ([first, *one, first + 10], [(10, 10.2, one)]),
            ([first, *one, first + 10, first + 12, *other], [(10, 10.2, one), (10.24, 10.6, other)]),
            ([first + 5, *one, first + 5, *other], [(10.1, 10.1, one), (10.1, 10.6, other)]),
            ([*one, first + 5, first + 7], [(10, 10.1, one)]),  # a prefix without a time
            ([first, *one, first + 32, first + 32, *other], [(10, 10.6, one), (10.6, 10.6, other)]),
        ):
            hypothesis = Hypothesis(tuple(token_ids), FinishReason.EOS, [])
            found = answers._segments(reading, hypothesis, model, None)
            assert [each.text for each in found] == [decode(ids) for *_, ids in expected]
            np.testing.assert_allclose(
                [(each.begin_seconds, each.end_seconds) for each in found],
                [(begin, end) for begin, end, _ in expected],
            )


async def test_segments_join_to_the_text_and_come_only_when_asked(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        for seed in range(4):
            given = tensor(spectrogram(noise(9_000, seed)[:, 0]))
            timed = await served.stub.Generate(message(given, timestamps=True, num_hypotheses=2, beam_size=3))
            for hypothesis in timed.hypotheses:
                assert "".join(each.text for each in hypothesis.segments) == hypothesis.text
                assert hypothesis.segments
            plain = await served.stub.Generate(message(given))
            assert not plain.hypotheses[0].segments
            assert plain.detected_language == ""


async def test_pieces_of_a_sound_whose_language_is_detected_join_to_the_result(whisper_path):
    content = encoded(noise(2 * SAMPLE_RATE))
    async with serving_bundles(whisper_path / "bundle") as served:
        for options in ({}, {"timestamps": True}, {"long_source": pb.LONG_SOURCE_SPLIT}):
            value = content if options.get("long_source") else tensor(spectrogram(noise(9_000)[:, 0]))
            request = message(value, source_language="", **options)
            whole = await served.stub.Generate(request)
            *events, last = [event async for event in served.stub.GenerateStream(request)]
            assert events
            assert "".join(event.piece.text for event in events) == last.result.hypotheses[0].text
            assert last.result.hypotheses == whole.hypotheses
            assert last.result.detected_language == whole.detected_language
            assert whole.detected_language in ("de", "en", "ko")


async def test_attention_has_a_column_for_each_position(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        for language in ("ko", ""):
            answer = await served.stub.Generate(
                message(tensor(GOOD), attention=True, source_language=language)
            )
            [hypothesis] = answer.hypotheses
            weights = np.array(hypothesis.attention.weights).reshape(-1, NUM_POSITIONS)
            is_eos = hypothesis.finish_reason == pb.FINISH_REASON_EOS
            assert len(weights) == len(hypothesis.token_ids) + is_eos
            np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-4)
            assert list(hypothesis.attention.source_tokens) == []


async def test_a_scored_target_needs_a_language_and_has_the_scores_of_transformers(whisper_path):
    theirs = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(whisper_path / "checkpoint").eval()
    settings = theirs.generation_config
    sound, chance = spectrogram(noise(9_000)[:, 0]), random.Random(0)
    token_ids = [chance.randrange(300) for _ in range(9)]
    request = pb.ScoreRequest(
        sources=[pb.Source(tensor=tensor(sound))], target=pb.Target(token_ids=pb.TokenIds(values=token_ids))
    )
    async with serving_bundles(whisper_path / "bundle") as served:
        details = await refusal(served.stub.Score(request))
        assert details.startswith("bundle needs a source_language: de, en, ko"), details
        request.source_language, request.task = "de", "translate"
        start = [
            settings.decoder_start_token_id,
            settings.lang_to_id["<|de|>"],
            settings.task_to_id["translate"],
            settings.no_timestamps_token_id,
        ]
        with torch.inference_mode():
            fed = torch.tensor([[*start, *token_ids]])
            logits = theirs(input_features=torch.tensor(sound)[None], decoder_input_ids=fed).logits
        labels = [*token_ids, settings.eos_token_id]
        expected = logits[0, len(start) - 1 :].log_softmax(-1)[range(len(labels)), labels]
        scored = await served.stub.Score(request)
        request.sources[0].CopyFrom(pb.Source(file=encoded(noise(SAMPLE_RATE))))
        details = await refusal(served.stub.Score(request))
        assert details.endswith("send a shorter one"), "Score does not have options.long_source"
        np.testing.assert_allclose(scored.log_probabilities, expected, atol=1e-4)
