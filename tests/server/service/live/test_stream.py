"""Streams of sound over gRPC: stable text stays, the whole answer is what was sent, and all is freed."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.errors import Overloaded
from seq2seq_serve.server.runner import voice_activity
from seq2seq_serve.server.service.live import stream as stream_module
from seq2seq_serve.server.service.live.admission import LiveStreams
from tests.bundle.test_audio import encoded
from tests.server.fakes import sample_value
from tests.server.service.harness import Served, serving_bundles
from tests.server.service.seq2seq.test_windows import ANYTHING_IS_GOOD, noise

OFF = pb.TurnDetection(off=True)


def pcm(samples: np.ndarray) -> bytes:
    return np.rint(np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()


def start(**given) -> pb.TranscribeRequest:
    settings = {
        "encoding": pb.SOUND_ENCODING_PCM_S16,
        "options": pb.GenerateOptions(source_language="ko", no_speech_threshold=1),
        "turn_detection": OFF,
        "interval_seconds": 0.1,
    }
    return pb.TranscribeRequest(start=pb.TranscribeStart(**settings | given))


def sound(content: bytes) -> pb.TranscribeRequest:
    return pb.TranscribeRequest(sound=content)


async def answered(
    stub, messages: Sequence[pb.TranscribeRequest], pause: float = 0.0
) -> list[pb.TranscribeResponse]:
    async def sent() -> AsyncIterator[pb.TranscribeRequest]:
        for message in messages:
            yield message
            await asyncio.sleep(pause)

    return [response async for response in stub.Transcribe(sent())]


def kinds(responses: Sequence[pb.TranscribeResponse]) -> list[str | None]:
    return [response.WhichOneof("event") for response in responses]


def check_whole(responses: Sequence[pb.TranscribeResponse]) -> None:
    """Checks that the words, the segments and the whole answer say the same, in order."""
    assert kinds(responses)[-1] == "result"
    assert kinds(responses).count("result") == 1
    words, number = list[pb.Word](), 0
    segments = [response.segment for response in responses if response.WhichOneof("event") == "segment"]
    for response in responses:
        if response.WhichOneof("event") == "text":
            words += response.text.stable
        elif response.WhichOneof("event") == "segment":
            number += len(response.segment.words)
            assert len(words) >= number, "a segment has words that were not stable before"
    assert [word for segment in segments for word in segment.words] == words
    [whole] = responses[-1].result.hypotheses
    assert list(whole.segments) == segments
    assert [token_id for segment in segments for token_id in segment.token_ids] == list(whole.token_ids)
    times = [time for word in words for time in (word.begin_seconds, word.end_seconds)]
    assert times == sorted(times)
    assert not times or times[-1] <= responses[-1].received_seconds + 1e-3


async def test_stable_text_is_never_taken_back_whatever_the_pieces_are(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        num_words = 0
        for seed in range(3):
            chance, content = random.Random(seed), pcm(noise(5, seed))
            messages, place = [start()], 0
            while place < len(content):
                size = chance.choice([1, 333, 3200, 9001])
                messages.append(sound(content[place : place + size]))
                place += size
            responses = await answered(served.stub, messages, 0.001)
            check_whole(responses)
            assert responses[-1].received_seconds == 5
            assert responses[-1].result.usage.source_seconds == 5
            num_words += sum(len(response.text.stable) for response in responses)
        assert num_words > 20


async def test_a_whole_segment_has_the_text_of_generate(whisper_path):
    """Without time for a decoding before its end, a segment is decoded as any sound."""
    content = pcm(noise(0.6))
    async with serving_bundles(whisper_path / "bundle") as served:
        options = pb.GenerateOptions(source_language="ko", **ANYTHING_IS_GOOD)
        messages = [start(interval_seconds=10, options=options), sound(content)]
        responses = await answered(served.stub, messages)
        check_whole(responses)
        options = pb.GenerateOptions(source_language="ko", max_new_tokens=32)
        source = pb.Source(file=content, file_type="audio/pcm; rate=16000")
        expected = await served.stub.Generate(pb.GenerateRequest(sources=[source], options=options))
        [model] = served.app.models
        has_time = model.manifest.timestamps.has
        assert list(responses[-1].result.hypotheses[0].token_ids) == [
            token_id for token_id in expected.hypotheses[0].token_ids if not has_time(token_id)
        ]


@pytest.mark.parametrize("has_words", [False, True])
async def test_the_segments_of_a_file_are_those_of_the_whole_in_any_pieces(whisper_path, has_words):
    content = encoded(noise(4, 3))
    options = pb.GenerateOptions(source_language="ko", no_speech_threshold=1)
    async with serving_bundles(whisper_path / "bundle") as served:
        answers = []
        for size in (len(content), 10_001, 997):
            pieces = [content[first : first + size] for first in range(0, len(content), size)]
            first = start(encoding=pb.SOUND_ENCODING_UNSPECIFIED, segments_only=True, options=options)
            responses = await answered(served.stub, [first, *map(sound, pieces)])
            check_segments(responses)
            answers.append(responses[-1].result.hypotheses)
        assert answers[0] == answers[1] == answers[2]
        assert len(answers[0][0].segments) > 4


def check_segments(responses: Sequence[pb.TranscribeResponse]) -> None:
    assert set(kinds(responses)) == {"segment", "result"}
    segments = [response.segment for response in responses[:-1]]
    assert list(responses[-1].result.hypotheses[0].segments) == segments


async def test_a_segment_is_finished_when_the_caller_says_so(whisper_path):
    content = pcm(noise(0.5))
    finish = pb.TranscribeRequest(finish_segment=pb.FinishSegment())
    async with serving_bundles(whisper_path / "bundle") as served:
        responses = await answered(
            served.stub, [start(), sound(content), finish, finish, sound(content), finish]
        )
        check_whole(responses)
        ends = [r.segment.end_seconds for r in responses if r.WhichOneof("event") == "segment"]
        assert len(ends) == 2
        assert ends[0] <= 0.5


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([sound(b"ab")], "the first message must have start"),
        ([], "the first message must have start"),
        ([start(), start()], "only the first message may have start"),
        ([start(), sound(b"abc")], "ends inside of a sample"),
        ([start(sample_rate=1)], "4000 to 192000 can be read"),
        ([start(encoding=9)], "encoding is 9"),
        ([start(interval_seconds=0.01)], "interval_seconds is 0.01, and must be from 0.1 to 10"),
        ([start(turn_detection=pb.TurnDetection(threshold=2))], "turn_detection.threshold is 2"),
        ([start(options=pb.GenerateOptions(attention=True))], "attention does not apply to a stream"),
        ([start(options=pb.GenerateOptions(source_language="xx"))], "source_language is 'xx'"),
        ([start(encoding=pb.SOUND_ENCODING_UNSPECIFIED), sound(bytes(99))], "is not a WAV"),
    ],
)
async def test_what_does_not_fit_is_refused(whisper_path, messages, text):
    async with serving_bundles(whisper_path / "bundle") as served:
        with pytest.raises(AioRpcError, match=text) as caught:
            await answered(served.stub, messages)
        assert caught.value.code() == StatusCode.INVALID_ARGUMENT


async def test_without_the_model_of_voice_activity_turns_must_be_off(whisper_path, monkeypatch):
    def missing() -> None:
        raise voice_activity.MissingVoiceActivityError

    monkeypatch.setattr(voice_activity, "_session", missing)
    async with serving_bundles(whisper_path / "bundle") as served:
        with pytest.raises(AioRpcError, match="cannot detect speech: turn detection off, or on the server"):
            await answered(served.stub, [start(turn_detection=None)])


async def until_idle(served: Served) -> None:
    """Waits for the turn in which the engine ends the rows of a caller who has left."""
    [model] = served.app.models
    async with asyncio.timeout(20):
        while any(model.engine.load()):
            await asyncio.sleep(0.01)


async def test_a_caller_who_leaves_frees_everything(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        calls = served.app.calls
        got = asyncio.Event()

        async def sent() -> AsyncIterator[pb.TranscribeRequest]:
            yield start()
            while True:
                yield sound(pcm(noise(0.3)))
                await asyncio.sleep(0.01)

        call = served.stub.Transcribe(sent())

        async def read() -> None:
            async for _ in call:
                got.set()

        reading = asyncio.create_task(read())
        await asyncio.wait_for(got.wait(), 20)
        assert calls.live.open.held.total() == 1
        assert sample_value(served.app.metrics, "seq2seq_live_streams", {}) == 1
        call.cancel()
        await asyncio.wait({reading})
        await asyncio.wait_for(calls.wait_until_idle(), 20)
        assert not calls.live.open.held
        assert not calls.held.held
        await until_idle(served)


async def test_a_stream_counts_only_while_sound_comes(whisper_path, monkeypatch):
    monkeypatch.setattr(stream_module, "IDLE_SECONDS", 0.05)
    async with serving_bundles(whisper_path / "bundle") as served:
        held = served.app.calls.live.open.held
        counts = []

        async def sent() -> AsyncIterator[pb.TranscribeRequest]:
            yield start()
            await asyncio.sleep(0.2)
            counts.append(held.total())
            for _ in range(2):
                yield sound(pcm(noise(0.1)))
                while not held.total():
                    await asyncio.sleep(0.001)
                counts.append(held.total())
                while held.total():
                    await asyncio.sleep(0.01)

        [*_] = [response async for response in served.stub.Transcribe(sent())]
        assert counts == [0, 1, 1]


def test_a_stream_that_would_make_others_late_is_refused():
    streams = LiveStreams(9, 0.7)
    room = streams.admit("a")
    for _ in range(99):
        streams.record(1.1)
    with pytest.raises(Overloaded, match=r"the 1 open live streams take .* would take 2.2 seconds"):
        streams.admit("b")
    room.close()
    streams.admit("b")


def test_streams_are_shared_by_callers():
    streams = LiveStreams(4, 0.7)
    for _ in range(4):
        streams.admit("a")
    streams.admit("b")
    with pytest.raises(Overloaded, match="live streams are open"):
        streams.admit("a")


async def test_a_server_that_drains_transcribes_what_it_has_heard(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        responses, heard = [], asyncio.Event()

        async def sent() -> AsyncIterator[pb.TranscribeRequest]:
            yield start(interval_seconds=0.2)
            yield sound(pcm(noise(0.5)))
            await asyncio.sleep(60)

        async def read() -> None:
            async for response in served.stub.Transcribe(sent()):
                responses.append(response)
                if not heard.is_set():
                    heard.set()
                    served.app.calls.drain()

        with pytest.raises(AioRpcError, match="shutting down") as caught:
            await read()
        assert caught.value.code() == StatusCode.UNAVAILABLE
        assert kinds(responses)[-1] == "segment"


async def test_a_caller_who_sends_fast_waits_and_one_who_does_not_read_is_not_read(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        num_sent = 0

        async def sent() -> AsyncIterator[pb.TranscribeRequest]:
            nonlocal num_sent
            yield start()
            content = pcm(noise(0.5)) * 200  # 3.2 MB
            for _ in range(40):
                yield sound(content)
                num_sent += 1

        call = served.stub.Transcribe(sent())
        await asyncio.sleep(3)
        assert num_sent < 40
        call.cancel()
        await asyncio.wait_for(served.app.calls.wait_until_idle(), 20)
        await until_idle(served)


@contextmanager
def requests_of(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Request]]:
    """The requests that the engine gets meanwhile."""
    [model] = served.app.models
    seen, submitted = list[Request](), model.engine.submitted

    def spied(requests, *given, **named):
        seen.extend(requests)
        return submitted(requests, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(model.engine, "submitted", spied)
        yield seen


async def test_live_windows_go_before_what_else_has_their_priority(whisper_path, monkeypatch):
    async with serving_bundles(whisper_path / "bundle") as served:
        with requests_of(served, monkeypatch) as seen:
            for only in (False, True):
                options = pb.GenerateOptions(source_language="ko", priority=3)
                messages = [start(options=options, segments_only=only), sound(pcm(noise(0.5)))]
                await answered(served.stub, messages)
        assert {request.priority for request in seen} == {2.5, 3}


async def test_stable_words_are_the_forced_prefix_and_the_rest_is_the_draft(whisper_path, monkeypatch):
    content = pcm(noise(3, 1))
    messages = [start(), *(sound(content[first : first + 1600]) for first in range(0, len(content), 1600))]
    async with serving_bundles(whisper_path / "bundle") as served:
        with requests_of(served, monkeypatch) as seen:
            responses = await answered(served.stub, messages, 0.01)
        whole = tuple(responses[-1].result.hypotheses[0].token_ids)
        prefixes = [request.prefix_ids for request in seen if request.prefix_ids and not request.is_score]
        assert len(prefixes) > 5
        for prefix in prefixes:
            places = range(len(whole) - len(prefix) + 1)
            assert any(whole[place : place + len(prefix)] == prefix for place in places)
        assert any(request.draft_ids for request in seen)


@pytest.mark.parametrize("segments_only", [False, True])
async def test_the_attention_that_words_get_their_times_from_is_counted(segments_only, whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        shares = served.app.calls.attention
        shares.limit = 1000
        messages = [start(segments_only=segments_only), sound(pcm(noise(1)))]
        assert kinds(await answered(served.stub, messages))[-1] == "result"  # nobody else holds any
        assert not shares.held
        with shares.take("another caller", shares.limit):
            with pytest.raises(AioRpcError, match="words get their times from attention") as refused:
                await answered(served.stub, messages)
            assert refused.value.code() is StatusCode.RESOURCE_EXHAUSTED


async def test_a_last_message_that_would_be_too_long_has_the_text_only(whisper_path, monkeypatch):
    content = pcm(noise(2))
    async with serving_bundles(whisper_path / "bundle") as served:
        expected = (await answered(served.stub, [start(), sound(content)]))[-1].result.hypotheses[0]
        assert expected.segments
        num_bytes = 2 * sum(segment.ByteSize() for segment in expected.segments)
        for most, is_whole in ((num_bytes, True), (num_bytes - 1, False)):
            monkeypatch.setattr(stream_module, "_MOST_WHOLE_BYTES", most)
            [result] = (await answered(served.stub, [start(), sound(content)]))[-1].result.hypotheses
            assert result.text == expected.text
            assert list(result.segments) == list(expected.segments if is_whole else ())
            assert list(result.token_ids) == list(expected.token_ids if is_whole else ())
