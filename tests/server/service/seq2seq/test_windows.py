"""Long sounds in windows, each from where the times of the one before end, as `generate` decodes them."""

import asyncio
import logging
import shutil
import threading
import time
import weakref
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from grpc import StatusCode
from grpc.aio import AioRpcError

from seq2seq_serve.bundle.audio import SAMPLE_RATE, log_mel, read_sound
from seq2seq_serve.bundle.manifest import Timestamps, load_bundle
from seq2seq_serve.export.__main__ import main as export_main
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.open_inference_pb2 import ModelInferRequest
from seq2seq_serve.protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from seq2seq_serve.server.engine.async_engine import Stream
from seq2seq_serve.server.errors import Overloaded
from seq2seq_serve.server.service import calls
from seq2seq_serve.server.service.seq2seq import generation, windows
from seq2seq_serve.server.service.seq2seq.windows import whole_segments
from seq2seq_serve.server.service.write import responses
from seq2seq_serve.server.service.write.word_times import token_times, words_of
from tests.bundle.test_audio import encoded
from tests.server.service.harness import serving_bundles

SECONDS, NUM_MELS, NUM_FRAMES = 0.64, 12, 64
ANYTHING_IS_GOOD = {"compression_ratio_threshold": 1000, "log_probability_threshold": -1000}
FIRST = 100  # the token of time 0


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    samples = 0.2 * np.random.default_rng(seed).standard_normal(int(seconds * SAMPLE_RATE))
    return samples * np.sin(np.arange(len(samples)) / 1_500) ** 2


def message(content: bytes, **options) -> pb.GenerateRequest:
    settings = {"long_source": pb.LONG_SOURCE_SEQUENTIAL, "source_language": "ko"} | options
    return pb.GenerateRequest(sources=[pb.Source(file=content)], options=pb.GenerateOptions(**settings))


def of_transformers(folder, content: bytes, *, is_conditioned: bool) -> list[tuple[float, float, list[int]]]:
    """The segments of the same sound by transformers' `generate`, at temperature 0."""
    theirs = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    samples = read_sound(content, 99)
    features = torch.tensor(log_mel(samples, NUM_MELS, len(samples) // 160))[None]
    answer = theirs.generate(
        features,
        attention_mask=torch.ones(features.shape[::2]),
        return_timestamps=True,
        return_segments=True,
        condition_on_prev_tokens=is_conditioned,
        temperature=0.0,
        language="ko",
        task="transcribe",
    )
    first_id = theirs.generation_config.no_timestamps_token_id + 1
    return [
        (float(one["start"]), float(one["end"]), [i for i in one["tokens"].tolist() if i < first_id])
        for one in answer["segments"][0]
    ]


@pytest.mark.parametrize("is_conditioned", [False, True])
async def test_windows_are_those_of_transformers(whisper_path, is_conditioned):
    async with serving_bundles(whisper_path / "bundle") as served:
        num_windows = 0
        for seed in range(3):
            content = encoded(noise(3.2, seed))
            request = message(content, condition_on_previous=is_conditioned, **ANYTHING_IS_GOOD)
            answer = await served.stub.Generate(request)
            expected = of_transformers(whisper_path / "checkpoint", content, is_conditioned=is_conditioned)
            found = answer.hypotheses[0].segments
            assert [list(one.token_ids) for one in found] == [ids for *_, ids in expected if ids]
            np.testing.assert_allclose(
                [one.end_seconds for one in found],
                [min(end, 3.2) for _, end, ids in expected if ids],  # theirs may end after the sound
                atol=1e-9,
            )
            num_windows += len(answer.sentences)
        assert num_windows > 3 * 5


@pytest.fixture(scope="module")
def moved_path(whisper_path, tmp_path_factory) -> tuple[Path, int, int]:
    """A Whisper one of whose words has a new id after the times, as if it was tuned with it; both ids.

    The row of its old id is zero, so that it is never written. The model is otherwise the same.
    """
    checkpoint, folder = whisper_path / "checkpoint", tmp_path_factory.mktemp("moved")
    theirs = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(checkpoint)
    tokenizer = transformers.WhisperTokenizer.from_pretrained(checkpoint)
    assert tokenizer.add_tokens([transformers.AddedToken(" neologism")]) == 1
    old_id, new_id = tokenizer.convert_tokens_to_ids("ĠÐ¶"), len(tokenizer) - 1  # " ж", which it writes often
    theirs.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        rows = theirs.get_output_embeddings().weight
        assert rows is theirs.get_input_embeddings().weight
        rows[new_id] = rows[old_id]
        rows[old_id] = 0
    theirs.save_pretrained(folder / "checkpoint")
    tokenizer.save_pretrained(folder / "checkpoint")
    shutil.copy(checkpoint / "generation_config.json", folder / "checkpoint")
    with redirect_stdout(StringIO()):
        paths = [str(folder / "checkpoint"), str(folder / "bundle")]
        assert export_main(["huggingface", *paths, "--precision", "fp32"]) == 0
    return folder / "bundle", old_id, new_id


@pytest.mark.slow  # exports another Whisper
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"condition_on_previous": False},
        {"long_source": pb.LONG_SOURCE_SPLIT, "timestamps": True},
    ],
)
async def test_a_word_that_was_added_after_the_times_is_a_word_like_others(whisper_path, moved_path, options):
    """The text ended at the first of them. In transformers it still counts as a time."""
    path, old_id, new_id = moved_path
    request = message(encoded(noise(6.0, 4)), **options, **ANYTHING_IS_GOOD)
    async with serving_bundles(whisper_path / "bundle") as served:
        expected = await served.stub.Generate(request)
    async with serving_bundles(path) as served:
        times = served.model.manifest.timestamps
        assert times.last_id == new_id - 1
        answer = await served.stub.Generate(request)

    def renamed(token_ids):
        return [new_id if one == old_id else one for one in token_ids]

    num_words, segments = 0, answer.hypotheses[0].segments
    for segment, other in zip(segments, expected.hypotheses[0].segments, strict=True):
        assert [*segment.token_ids] == renamed(other.token_ids)
        assert (segment.begin_seconds, segment.end_seconds) == (other.begin_seconds, other.end_seconds)
        num_in_segment = [*segment.token_ids].count(new_id)
        assert segment.text.count(" neologism") == num_in_segment
        num_words += num_in_segment
    assert num_words > 5
    assert answer.usage.source_seconds == expected.usage.source_seconds


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([], (0, None)),
        ([FIRST, 1, 2], (3, None)),  # no end
        ([FIRST, 1, FIRST + 9], (3, None)),  # nobody speaks after it
        ([FIRST, 1, FIRST + 9, FIRST + 9], (3, 9)),
        ([FIRST, 1, FIRST + 9, FIRST + 11, 2, 3], (3, 9)),  # what follows is cut
        ([FIRST, 1, FIRST + 9, FIRST + 11, 2, FIRST + 20], (6, None)),
        ([FIRST, 1, FIRST + 9, FIRST + 11, 2, FIRST + 20, FIRST + 20], (6, 20)),
        ([FIRST, 1, FIRST + 1, FIRST + 1, 2], (5, None)),  # too little progress
        ([FIRST, 1, FIRST + 9, FIRST + 9, FIRST + 51, FIRST + 52], (3, 9)),  # two words after the times
    ],
)
def test_the_next_window_begins_after_the_last_whole_segment(token_ids, expected):
    assert (
        whole_segments(token_ids, Timestamps(FIRST, FIRST + 50, 0.02, FIRST - 1), least_steps=2) == expected
    )


async def test_a_bad_text_is_decoded_again_at_higher_temperatures(whisper_path):
    content = encoded(noise(SECONDS))
    async with serving_bundles(whisper_path / "bundle") as served:
        windows = []
        for options in (
            ANYTHING_IS_GOOD,
            ANYTHING_IS_GOOD | {"compression_ratio_threshold": 0},
            ANYTHING_IS_GOOD | {"log_probability_threshold": 0, "no_speech_threshold": 1},
            {"temperature": 0.5, "seed": 3} | ANYTHING_IS_GOOD | {"compression_ratio_threshold": 0},
        ):
            answer = await served.stub.Generate(message(content, **options))
            window = answer.hypotheses[0].segments[0].window
            windows.append(window)
            is_unsure = "no_speech_threshold" in options
            assert window.HasField("no_speech_probability") == is_unsure
            assert not is_unsure or 0 < window.no_speech_probability < 1
            assert window.mean_log_probability < 0
            again = await served.stub.Generate(message(content, **options))
            assert again.hypotheses == answer.hypotheses
        good, repeating, unsure, given = windows
        assert (good.temperature, given.temperature) == (0, 0.5)
        # None is good, so the most probable of all is taken.
        assert repeating.mean_log_probability >= good.mean_log_probability
        assert (repeating.temperature, repeating.compression_ratio) == (
            unsure.temperature,
            unsure.compression_ratio,
        )
        threshold = windows[0].compression_ratio - 0.001
        better = message(content, **ANYTHING_IS_GOOD | {"compression_ratio_threshold": threshold})
        window = (await served.stub.Generate(better)).hypotheses[0].segments[0].window
        assert window.temperature > 0
        assert window.compression_ratio <= threshold


async def test_only_the_bad_pieces_of_a_split_sound_are_decoded_again(whisper_path):
    content, given = encoded(noise(4.0)), {"long_source": pb.LONG_SOURCE_SPLIT, "beam_size": 3}
    async with serving_bundles(whisper_path / "bundle") as served:
        engine, num_requests = served.model.engine, 0
        submitted = engine.submitted

        def counted(requests, *args, **options):
            nonlocal num_requests
            num_requests += len(requests)
            return submitted(requests, *args, **options)

        engine.submitted = counted
        times = {"timestamps": True, "source_language": ""}
        whole = await served.stub.Generate(message(content, **given, **times, **ANYTHING_IS_GOOD))
        assert num_requests == len(whole.sentences) > 5
        windows = [one.hypotheses[0].segments[0].window for one in whole.sentences]
        assert windows[0].begin_seconds == 0 < windows[1].begin_seconds
        means = [one.mean_log_probability for one in windows]
        threshold = sorted(means)[2] - 1e-4
        is_bad = [mean < threshold for mean in means]
        assert sum(is_bad) == 2
        better = ANYTHING_IS_GOOD | {"log_probability_threshold": threshold, "no_speech_threshold": 1}
        request = message(content, **given, **times, **better)
        num_requests = 0
        answer = await served.stub.Generate(request)
        assert len(means) + 2 * 2 <= num_requests <= len(means) + 2 * 6
        for one, other, is_again in zip(answer.sentences, whole.sentences, is_bad, strict=True):
            window = one.hypotheses[0].segments[0].window
            assert window.HasField("no_speech_probability") == is_again
            assert is_again or one.hypotheses == other.hypotheses
            assert window.mean_log_probability >= other.hypotheses[0].segments[0].window.mean_log_probability
        *events, last = [event async for event in served.stub.GenerateStream(request)]
        assert last.result.hypotheses == answer.hypotheses
        assert last.result.detected_language == whole.detected_language != ""
        texts = [one.hypotheses[0].text for one in answer.sentences]
        assert [event.piece.text for event in events] == texts


@pytest.mark.parametrize("speaks", [True, False])
async def test_what_follows_the_last_time_of_a_piece_is_decoded(whisper_path, monkeypatch, speaks):
    """Of 34 seconds of clean speech, nothing was written for 24.1 to 29.8: the target ended before."""
    first_id = load_bundle(whisper_path / "bundle").manifest.timestamps.first_id
    pair, single, rest = [0, -5, 10, 10], [0, -6, 8], [0, -7]  # times in steps, and words below 0
    targets = iter(
        [[first_id + each if each >= 0 else -each for each in one] for one in (pair, single, rest)]
    )
    decoded = windows.decode_window

    async def scripted(*arguments):
        made = await decoded(*arguments)
        best, token_ids = made.result.best, next(targets)
        best = best._replace(token_ids=token_ids, token_scores=best.token_scores[:1] * len(token_ids))
        return made._replace(result=made.result._replace(hypotheses=(best,)), is_silent=False)

    monkeypatch.setattr(windows, "decode_window", scripted)
    options = {"long_source": pb.LONG_SOURCE_SPLIT, "timestamps": True, "no_speech_threshold": int(speaks)}
    async with serving_bundles(whisper_path / "bundle") as served:
        answer = await served.stub.Generate(message(encoded(noise(0.6)), **options, **ANYTHING_IS_GOOD))
    segments = answer.hypotheses[0].segments
    assert [[*one.token_ids] for one in segments] == [[5], [6], [7]][: 2 + speaks]
    assert [one.window.begin_seconds for one in segments] == pytest.approx([0.0, 0.2, 0.36][: 2 + speaks])
    assert next(targets, None) is None


async def test_silence_has_no_text(whisper_path):
    """The model itself writes something, as Whisper does."""
    async with serving_bundles(whisper_path / "bundle") as served:
        silent = await served.stub.Generate(message(encoded(np.zeros(3 * SAMPLE_RATE)), source_language=""))
        assert silent.hypotheses[0].text == ""
        assert not silent.hypotheses[0].segments
        assert silent.usage.source_seconds == 3
        assert silent.detected_language in ("en", "de", "ko")
        sound = np.concatenate([np.zeros(2 * SAMPLE_RATE), noise(SECONDS)])
        heard = await served.stub.Generate(message(encoded(sound), **ANYTHING_IS_GOOD))
        assert heard.usage.source_seconds == len(sound) / SAMPLE_RATE
        ended = await served.stub.Generate(message(encoded(sound[::-1]), **ANYTHING_IS_GOOD))
        assert ended.usage.source_seconds == len(sound) / SAMPLE_RATE
        assert ended.sentences[-1].usage.source_seconds < 2
        assert heard.hypotheses[0].segments
        assert heard.hypotheses[0].segments[0].begin_seconds > 1.9
        # By the model's own rule: it is not sure, and hears no speech with a probability above 0.
        unsure = {"log_probability_threshold": 0, "no_speech_threshold": 0}
        silent = await served.stub.Generate(message(encoded(noise(2.0)), **unsure))
        assert silent.hypotheses[0].text == ""


async def test_a_language_is_detected_where_somebody_speaks(whisper_path, monkeypatch):
    """Each silent window was taken for a language, and the first of them for that of the sound."""
    seen: list[tuple[int, ...]] = []
    async with serving_bundles(whisper_path / "bundle") as served:
        model, decoded = served.model, windows.decode_window
        ids = model.manifest.choices["source_language"].ids

        async def first_is_silent(request, rules, model, decode):
            found = await decoded(request, rules, model, decode)
            seen.append(request.detected_ids)
            return found._replace(is_silent=len(seen) == 1)

        monkeypatch.setattr(windows, "decode_window", first_is_silent)
        request = message(encoded(noise(3 * SECONDS)), source_language="", **ANYTHING_IS_GOOD)
        answer = await served.stub.Generate(request)
        assert [bool(one) for one in seen] == [True, True, *[False] * (len(seen) - 2)]
        assert len(seen) > 2
        assert answer.detected_language in ids
        silent = message(encoded(noise(SECONDS)), source_language="")
        seen.clear()
        answer = await served.stub.Generate(silent)
        assert (answer.hypotheses[0].text, answer.detected_language) == ("", min(ids, key=ids.get))


async def test_the_probability_of_no_speech_is_that_of_the_token_after_the_start(whisper_path):
    content = encoded(noise(SECONDS))
    theirs = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(whisper_path / "checkpoint").eval()
    features = torch.tensor(log_mel(read_sound(content, 9), NUM_MELS, NUM_FRAMES))[None]
    settings = theirs.generation_config
    with torch.no_grad():
        logits = theirs(features, decoder_input_ids=torch.tensor([[settings.decoder_start_token_id]])).logits
    expected = logits[0, 0].softmax(-1)[settings.no_timestamps_token_id - 1].item()
    async with serving_bundles(whisper_path / "bundle") as served:
        request = message(content, log_probability_threshold=0, no_speech_threshold=1)
        [segment, *_] = (await served.stub.Generate(request)).hypotheses[0].segments
        assert segment.window.no_speech_probability == pytest.approx(expected, rel=1e-3)


async def test_pieces_are_the_windows_and_join_to_the_result(whisper_path):
    request = message(encoded(noise(2.0)), source_language="", **ANYTHING_IS_GOOD)
    async with serving_bundles(whisper_path / "bundle") as served:
        whole = await served.stub.Generate(request)
        *events, last = [event async for event in served.stub.GenerateStream(request)]
        assert len(events) == len(whole.sentences) > 3
        assert last.result.hypotheses == whole.hypotheses
        assert last.result.detected_language == whole.detected_language != ""
        assert "".join(event.piece.text for event in events) == whole.hypotheses[0].text
        segments = whole.hypotheses[0].segments
        assert "".join(one.text for one in segments) == whole.hypotheses[0].text
        times = [time for one in segments for time in (one.begin_seconds, one.end_seconds)]
        assert times == sorted(times)
        assert times[-1] <= 2
        assert whole.timings.total_seconds >= max(
            one.usage.source_seconds > 0 and whole.timings.encode_seconds for one in whole.sentences
        )


async def test_windows_of_many_sounds_share_steps(whisper_path):
    """Each of them is a request of its own, and has the tokens that it has alone."""
    contents = [encoded(noise(1.3, seed)) for seed in range(3)]
    async with serving_bundles(whisper_path / "bundle") as served:
        alone = [await served.stub.Generate(message(one, **ANYTHING_IS_GOOD)) for one in contents]
        most_rows = 0
        record = served.model.engine._record

        def watched(turn):
            nonlocal most_rows
            most_rows = max(most_rows, turn.num_rows)
            record(turn)

        served.model.engine._record = watched
        together = await asyncio.gather(
            *(served.stub.Generate(message(one, **ANYTHING_IS_GOOD)) for one in contents)
        )
        assert [one.hypotheses for one in together] == [one.hypotheses for one in alone]
        assert most_rows > 1


def two_sounds() -> ModelInferRequest:
    request = ModelInferRequest(model_name="bundle")
    given = request.inputs.add(name="sound", datatype="BYTES", shape=[2])
    given.contents.bytes_contents.extend([encoded(noise(2.0)), encoded(noise(SECONDS))])
    for name, value in {"source_language": "ko", "long_source": "sequential"}.items():
        request.parameters[name].string_param = value
    for name, value in ANYTHING_IS_GOOD.items():
        request.parameters[name].double_param = value
    return request


async def test_a_damaged_sound_of_a_batch_is_named_by_its_row(whisper_path):
    """The error did not say which of them it was."""
    request = two_sounds()
    request.inputs[0].contents.bytes_contents[1] = b"RIFF"
    async with serving_bundles(whisper_path / "bundle") as served:
        with pytest.raises(AioRpcError, match="row 1 of sound: sound: the file is damaged") as caught:
            await GRPCInferenceServiceStub(served.channel).ModelInfer(request)
        assert caught.value.code() is StatusCode.INVALID_ARGUMENT


async def test_an_accepted_sound_is_finished_while_the_server_drains(whisper_path):
    """Its second window was refused, and so was a call's second sound."""
    sound = message(encoded(noise(2.0)), **ANYTHING_IS_GOOD)
    async with serving_bundles(whisper_path / "bundle") as served:
        triton = GRPCInferenceServiceStub(served.channel)
        expected = await served.stub.Generate(sound)
        expected_of_two = await triton.ModelInfer(two_sounds())
        assert len(expected.sentences) > 3
        drains = [served.model.engine, served.app.calls.files]
        submitted = served.model.engine.submitted

        @contextmanager
        def submitted_before_the_drain(*args, **options):
            with submitted(*args, **options) as streams:
                for one in drains:
                    one.drain()
                yield streams

        served.model.engine.submitted = submitted_before_the_drain
        assert (await served.stub.Generate(sound)).hypotheses == expected.hypotheses
        with pytest.raises(AioRpcError, match="shutting down"):
            await served.stub.Generate(sound)
        for one in drains:
            one._is_draining = False
        assert (await triton.ModelInfer(two_sounds())).outputs == expected_of_two.outputs


def test_only_the_first_request_of_a_sound_is_refused_by_a_full_queue(whisper_path, caplog):
    """The later ones of its first window were, too. Each counted the source of the window once more."""
    caplog.set_level(logging.INFO)
    never_good = ANYTHING_IS_GOOD | {"log_probability_threshold": 0, "no_speech_threshold": 1}
    request = message(encoded(noise(SECONDS)), **never_good)

    async def run():
        async with serving_bundles(whisper_path / "bundle") as served:
            queue, full = served.model.engine._queue, []
            add = queue.add

            def add_if_there_is_room(*args):
                full.append(not full or not full[-1])  # every second time, and the first
                if full[-1]:
                    raise Overloaded("the queue is full", retry_after_seconds=0.0)
                add(*args)

            queue.add = add_if_there_is_room
            with pytest.raises(AioRpcError, match="the queue is full"):
                await served.stub.Generate(request)
            answer = await served.stub.Generate(request)
            num_windows = max(len(answer.sentences), 1)
            assert len(full) == 2 * num_windows * 7  # six temperatures, and the probability of no speech
            assert served.app.models.statistics_of(served.model).num_refused == 1
            return answer.usage.source_tokens

    num_source_tokens = asyncio.run(run())
    line = [record.fields for record in caplog.records if record.name.endswith("access_log")][-1]
    assert (line["mode"], line["source_tokens"]) == ("greedy", num_source_tokens)


async def test_a_prompt_is_read_before_the_target(whisper_path):
    content = encoded(noise(SECONDS))
    theirs = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(whisper_path / "checkpoint").eval()
    features = torch.tensor(log_mel(read_sound(content, 9), NUM_MELS, NUM_FRAMES))[None]
    async with serving_bundles(whisper_path / "bundle") as served:
        tokenizer, times = served.model.target_tokenizer, served.model.manifest.timestamps
        for prompt in ("a b", "a long prompt, of which the last tokens are read " * 4):
            token_ids = tokenizer.encode(f" {prompt.strip()}")[-19:]
            expected = theirs.generate(
                features,
                prompt_ids=torch.tensor([times.previous_id, *token_ids]),
                language="ko",
                task="transcribe",
                max_new_tokens=12,
            )[0].tolist()
            options = {"long_source": pb.LONG_SOURCE_REFUSE, "max_new_tokens": 12}
            answer = await served.stub.Generate(message(content, prompt=prompt, **options))
            found = list(answer.hypotheses[0].token_ids)
            assert found
            assert expected[: len(found)] == found


async def test_words_have_the_times_of_the_attention_of_transformers_heads(whisper_path, monkeypatch):
    read = []
    monkeypatch.setattr(responses, "token_times", lambda *args: read.append(args) or token_times(*args))
    content = encoded(noise(SECONDS))
    theirs = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(
        whisper_path / "checkpoint", attn_implementation="eager"
    ).eval()
    features = torch.tensor(log_mel(read_sound(content, 9), NUM_MELS, NUM_FRAMES))[None]
    async with serving_bundles(whisper_path / "bundle") as served:
        model = served.model
        start_ids = [
            model.manifest.choices[one].ids["ko" if one == "source_language" else "transcribe"]
            if isinstance(one, str)
            else one
            for one in model.manifest.template.start[:-1]
        ]
        options = {"long_source": pb.LONG_SOURCE_REFUSE, "word_timestamps": True, "attention": True}
        answer = await served.stub.Generate(message(content, **options))
        [hypothesis] = answer.hypotheses
        fed = torch.tensor([[*start_ids, *hypothesis.token_ids]])
        with torch.inference_mode():
            weights = theirs(features, decoder_input_ids=fed, output_attentions=True).cross_attentions
        # The checkpoint does not name its heads, and has one layer.
        attention = weights[0][0, :, len(start_ids) - 1 :].transpose(0, 1).numpy()  # (T, H, S)
        [(found, *others, checkpoint)] = read
        np.testing.assert_allclose(found, attention[: len(found)], atol=1e-5)
        shown = np.reshape(hypothesis.attention.weights, (-1, attention.shape[2]))
        np.testing.assert_allclose(shown, found.mean(axis=1), atol=1e-6)
        tokens = model.manifest.timestamps
        assert others == [tuple(hypothesis.token_ids), tokens, SECONDS, SECONDS / attention.shape[2]]
        times = token_times(found, *others, checkpoint)
        place, num_words = 0, 0
        for segment in hypothesis.segments:
            while tokens.has(hypothesis.token_ids[place]):
                place += 1
            words = words_of(segment.token_ids, model.target_tokenizer)
            assert [word.text for word in segment.words] == [word.text for word in words]
            for word, expected in zip(segment.words, words, strict=True):
                assert word.begin_seconds == pytest.approx(times[place + expected.first][0])
                assert word.end_seconds == pytest.approx(times[place + expected.last][1])
            place, num_words = place + len(segment.token_ids), num_words + len(words)
        assert num_words > 2


def test_the_attention_of_pieces_is_dropped_before_the_answer_is_built(whisper_path, monkeypatch):
    answered, timed = [], []
    streams, begin = weakref.WeakSet(), Stream.__init__

    def noted(stream, request):
        begin(stream, request)
        streams.add(stream)

    def build(pairs, decoding):
        answered.append([len(pairs), sum(responses.attention_bytes(result) for _, result in pairs)])
        return responses.generate_response(pairs, decoding)

    def times_of(reading, result, decoding, checkpoint):
        assert responses.attention_bytes(result) > 0
        timed.append([one.result is result for one in streams].count(True))
        return responses.with_token_times(reading, result, decoding, checkpoint)

    monkeypatch.setattr(Stream, "__init__", noted)
    monkeypatch.setattr(generation, "generate_response", build)
    monkeypatch.setattr(generation, "with_token_times", times_of)
    given = {"long_source": pb.LONG_SOURCE_SPLIT, "word_timestamps": True, **ANYTHING_IS_GOOD}

    async def run():
        async with serving_bundles(whisper_path / "bundle") as served:
            whole = await served.stub.Generate(message(encoded(noise(2.5)), **given))
            streamed = [
                one async for one in served.stub.GenerateStream(message(encoded(noise(2.5)), **given))
            ]
            assert streamed[-1].result.sentences == whole.sentences
            return len(whole.sentences)

    num_pieces = asyncio.run(run())
    assert answered == [[num_pieces, 0]] * 2
    assert num_pieces > 3
    of_last = timed[num_pieces - 1]  # which a frame of the engine may hold until the call ends
    assert timed == [*[0] * (num_pieces - 1), of_last] * 2


async def test_the_attention_from_which_words_get_their_times_is_bounded(whisper_path, monkeypatch):
    """It was not counted: that of 50 pieces can take a gigabyte, and the answer to them a few kilobytes."""
    sizes, counted = [], []

    def times_of(reading, result, decoding, checkpoint):
        sizes.append(responses.attention_bytes(result))
        return responses.with_token_times(reading, result, decoding, checkpoint)

    monkeypatch.setattr(generation, "with_token_times", times_of)
    async with serving_bundles(whisper_path / "bundle") as served:
        shares, sizing = served.app.calls.attention, served.model.sizing
        take = shares.take
        monkeypatch.setattr(shares, "take", lambda *one: counted.append(one[1]) or take(*one))
        of_one = (12 + 1) * sizing.num_alignment_heads * served.model.max_memory_length * 4
        for way in (pb.LONG_SOURCE_SPLIT, pb.LONG_SOURCE_SEQUENTIAL):
            sizes.clear()
            content, shares.limit = encoded(noise(2.5)), of_one
            given = message(content, long_source=way, word_timestamps=True, max_new_tokens=12)
            await served.stub.Generate(given)
            assert not shares.held
            # An attempt, and the best one before it; of each piece that is open, the windows before it, too
            assert counted[-1] == (3 * 5 if way == pb.LONG_SOURCE_SPLIT else 2) * of_one
            assert 0 < max(sizes) <= of_one
            with shares.take("another caller", of_one):
                with pytest.raises(AioRpcError, match="words get their times from attention") as caught:
                    await served.stub.Generate(given)
                assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("long_source", [pb.LONG_SOURCE_SEQUENTIAL, pb.LONG_SOURCE_SPLIT])
async def test_words_of_a_long_sound_do_not_change_its_target_and_have_its_times(whisper_path, long_source):
    content = encoded(noise(2.5))
    async with serving_bundles(whisper_path / "bundle") as served:
        given = {"long_source": long_source, "timestamps": True, **ANYTHING_IS_GOOD}
        without = await served.stub.Generate(message(content, **given))
        answer = await served.stub.Generate(message(content, word_timestamps=True, **given))
        assert answer.hypotheses[0].text == without.hypotheses[0].text
        assert len(answer.sentences) > 3
        num_words = 0
        for sentence in answer.sentences:
            end = sentence.usage.source_seconds
            for segment in sentence.hypotheses[0].segments:
                assert "".join(word.text for word in segment.words) == segment.text
                times = [time for word in segment.words for time in (word.begin_seconds, word.end_seconds)]
                assert times == sorted(times) == [round(one, 3) for one in times]  # not 4.5200000000000005
                assert (segment.begin_seconds, segment.end_seconds) == (times[0], times[-1])
                assert end - SECONDS - 1e-9 <= times[0]
                assert times[-1] <= end + 1e-9
                num_words += len(segment.words)
        assert num_words > 5
        joined = answer.hypotheses[0].segments
        assert [one for each in answer.sentences for one in each.hypotheses[0].segments] == list(joined)


async def test_an_option_or_a_sound_that_does_not_fit_is_refused_with_the_reason(whisper_path):
    split, second = {"long_source": pb.LONG_SOURCE_SPLIT}, encoded(noise(1))
    windows = encoded(np.zeros(int(50.1 * SECONDS * SAMPLE_RATE)))  # more than fifty
    truncate = {"long_source": pb.LONG_SOURCE_TRUNCATE, "no_speech_threshold": 0.5}
    async with serving_bundles(whisper_path / "bundle") as served:
        for sound, options, expected in (
            (second, {"num_hypotheses": 2}, "num_hypotheses applies to one target"),
            (second, split | {"condition_on_previous": False}, "condition_on_previous needs the long_source"),
            (second, truncate, "no_speech_threshold needs the long_source split, split_always or sequential"),
            (second, {"prompt": "a" * 9999}, "the prompt has 9999 bytes"),
            (second, split | {"word_timestamps": True, "num_hypotheses": 2}, "word_timestamps apply to one"),
            (windows, {}, "sound: the sound has 32.06 seconds, and 32 is the limit"),
        ):
            with pytest.raises(AioRpcError) as caught:
                await served.stub.Generate(message(sound, **options))
            assert caught.value.code() is StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith(expected)


async def test_only_the_first_sound_of_a_call_is_refused_for_the_spectrograms_of_others(
    whisper_path, monkeypatch
):
    async with serving_bundles(whisper_path / "bundle") as served:
        triton = GRPCInferenceServiceStub(served.channel)
        expected = await triton.ModelInfer(two_sounds())
        held = served.app.calls.held
        take, limit = held.take, held.limit
        for num_taken in (1, 2):  # the message, and the first spectrogram: then others have the rest
            left = count(num_taken, -1)

            def taken_while_there_is_room(caller, num_bytes, left=left):
                held.limit = limit if next(left) else 1
                return take(caller, num_bytes)

            monkeypatch.setattr(held, "take", taken_while_there_is_room)
            if num_taken == 1:
                text = r"there is no room for what is in the files"
                with pytest.raises(AioRpcError, match=text):
                    await triton.ModelInfer(two_sounds())
            else:
                assert (await triton.ModelInfer(two_sounds())).outputs == expected.outputs
        await served.until_calls_are_over()


async def test_a_short_sound_is_read_while_a_long_one_of_the_same_caller_is(whisper_path, monkeypatch):
    """All people behind one proxy are one caller, too. A long sound had the thread until its end."""
    monkeypatch.setattr(calls, "_MOST_FILE_THREADS", 1)
    is_answered, begun = threading.Event(), threading.Event()
    read = generation.read_sources

    def read_slowly(decoding, call, inputs, checkpoint):
        while not begun.is_set() or (len(inputs[0].source.file) == len(long) and not is_answered.is_set()):
            begun.set()
            time.sleep(0.001)
            checkpoint()
        return read(decoding, call, inputs, checkpoint)

    monkeypatch.setattr(generation, "read_sources", read_slowly)
    long, short = encoded(noise(3.0)), encoded(noise(0.5))
    async with serving_bundles(whisper_path / "bundle") as served:
        of_long = asyncio.ensure_future(served.stub.Generate(message(long, **ANYTHING_IS_GOOD)))
        assert await asyncio.to_thread(begun.wait, 20)
        for _ in range(3):
            await asyncio.wait_for(served.stub.Generate(message(short, **ANYTHING_IS_GOOD)), 40)
        assert not of_long.done()
        is_answered.set()
        assert len((await of_long).sentences) > 3


async def test_an_item_of_a_batch_is_read_when_there_is_room_for_its_spectrogram(whisper_path, monkeypatch):
    """Each of 88 open items had its spectrogram while it waited for room to be decoded."""
    monkeypatch.setattr(calls, "_MAX_HELD_BYTES", 200_000)
    size = 3_000 * NUM_MELS * 4
    request = pb.GenerateBatchRequest()
    given = message(encoded(np.zeros(30 * SAMPLE_RATE), form="FLAC"))
    request.options.CopyFrom(given.options)
    for _ in range(5):
        request.items.add().sources.extend(given.sources)
    assert size < 200_000 < 2 * size
    async with serving_bundles(whisper_path / "bundle") as served:
        expected = await served.stub.Generate(given)
        held, most = served.app.calls.held, []
        read = generation.read_sources

        def noted(*given):
            most.append(sum(held.held.values()))
            return read(*given)

        monkeypatch.setattr(generation, "read_sources", noted)
        for num_others in (0, 190_000):
            others = held.add("another", num_others)
            answers = [answer async for answer in served.stub.GenerateBatch(request)]
            others.close()
            assert [one.response.hypotheses for one in answers] == [expected.hypotheses] * 5
            assert max(most) < 200_000 + size  # one item goes on beyond the bound
            most.clear()
        await served.until_calls_are_over()


async def test_the_spectrograms_of_open_sounds_are_bounded(whisper_path, monkeypatch):
    """A file of silence is small, and its spectrogram is not."""
    silent = encoded(np.zeros(30 * SAMPLE_RATE), form="FLAC")
    monkeypatch.setattr(calls, "_MAX_HELD_BYTES", 200_000)
    assert len(silent) < 20_000 < 3_000 * NUM_MELS * 4 < 200_000 < 2 * 3_000 * NUM_MELS * 4
    async with serving_bundles(whisper_path / "bundle") as served:
        shares, held = served.app.calls.held, []
        take = shares.take

        def taken_while_the_other_is_refused(caller, num_bytes):
            room = take(caller, num_bytes)
            held.append(dict(shares.held))
            with pytest.raises(Overloaded, match="the limit is 200000"):
                take(caller, num_bytes)
            return room

        monkeypatch.setattr(shares, "take", taken_while_the_other_is_refused)
        answer = await served.stub.Generate(message(silent))
        assert answer.usage.source_seconds == 30
        [of_callers] = held
        assert sum(of_callers.values()) >= 3_000 * NUM_MELS * 4
        assert not shares.held
