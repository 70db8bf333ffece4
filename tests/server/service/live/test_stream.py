"""Streams of sound over gRPC: stable text stays, the whole answer is what was sent, and all is freed."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from seq2seq_serve.bundle import sound_streams
from seq2seq_serve.bundle.audio import SAMPLE_RATE
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.errors import Overloaded
from seq2seq_serve.server.runner import voice_activity
from seq2seq_serve.server.service.call import Call
from seq2seq_serve.server.service.live import admission, transcription
from seq2seq_serve.server.service.live import stream as stream_module
from seq2seq_serve.server.service.live.admission import LiveStreams
from seq2seq_serve.server.service.live.stream import Command, LiveStream, Send
from seq2seq_serve.server.service.live.transcription import LiveDecoder, SpokenWord
from seq2seq_serve.server.telemetry.record import Caller
from seq2seq_serve.server.telemetry.statistics import Statistics
from tests.bundle.test_audio import encoded
from tests.server.fakes import sample_value
from tests.server.service.harness import Served, serving_bundles
from tests.server.service.live.test_turns import detect_by_loudness
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
    monkeypatch.setattr(admission, "_IDLE_SECONDS", 0.05)
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


async def test_a_caller_who_sends_no_sound_takes_no_place_and_no_memory(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        calls, counts = served.app.calls, []

        async def sent() -> AsyncIterator[pb.TranscribeRequest]:
            yield start(segments_only=True)
            for _ in range(3):
                yield sound(b"")
                await asyncio.sleep(0.05)
                counts.append((calls.live.open.held.total(), calls.held.held.total()))
            yield sound(pcm(noise(0.1)))
            async with asyncio.timeout(20):
                while not calls.held.held.total():
                    await asyncio.sleep(0.001)

        [*_] = [response async for response in served.stub.Transcribe(sent())]
        [*_] = await answered(served.stub, [start(), sound(b""), sound(b"")])
        assert counts == [(0, 0)] * 3
        assert served.metric("seq2seq_live_decodings_total") == 0


def test_a_stream_that_would_make_others_late_is_refused():
    streams = LiveStreams(9, 0.7)
    room = streams.admit("a")
    for _ in range(99):
        streams.record(1.1)
    with pytest.raises(Overloaded, match=r"the 1 open live streams take .* would take 2.2 seconds"):
        streams.admit("b")
    room.close()
    streams.admit("b")


def test_decodings_of_long_ago_say_nothing_about_the_next_ones(monkeypatch):
    """After a busy hour and a pause, the second stream was refused for what the first decodings took."""
    now = 0.0
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: now))
    streams = LiveStreams(9, 0.7)
    for _ in range(99):
        streams.record(8)
    now = 60
    streams.admit("a")
    streams.record(0.1)
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


@dataclass
class Direct:
    """A stream without a caller, whose events the test gets.

    Attributes:
        stream: It.
        statistics: Those of its model.
        num_bytes: The size of each work that was read.
    """

    stream: LiveStream
    statistics: Statistics
    num_bytes: list[int]


def direct(served: Served, send: Send, lives: LiveStreams | None = None, **given) -> Direct:
    num_bytes, statistics = list[int](), Statistics()

    class Counting(Call):
        async def read(self, work, num_bytes_, *, num_file_bytes=None):
            num_bytes.append(num_bytes_)
            return await super().read(work, num_bytes_, num_file_bytes=num_file_bytes)

    [model] = served.app.models
    call = Counting(request_id="live", caller=Caller(""))
    stream = LiveStream(start(**given).start, model, call, lives or LiveStreams(1, 0.7), statistics, send)
    return Direct(stream, statistics, num_bytes)


async def test_what_is_said_while_a_stream_waits_is_in_its_next_decoding(whisper_path, monkeypatch):
    """It was heard by the decoding after that: eight streams waited for each other twice."""
    # The most tokens tell how long the sound is: one for the first piece alone.
    monkeypatch.setattr(transcription, "_TOKENS_PER_SECOND", 5)
    monkeypatch.setattr(transcription, "_MORE_TOKENS", 0)
    async with serving_bundles(whisper_path / "bundle") as served:
        [model] = served.app.models
        lives = LiveStreams(1, 0.7)
        one = direct(served, nobody, lives=lives)
        line, are_free = lives.line(model.engine), asyncio.Event()

        async def take() -> None:
            async with line.place("", 0):
                await are_free.wait()

        async def commands() -> AsyncIterator[bytes]:
            for number in range(5):
                yield pcm(noise(0.2, number))
            are_free.set()
            await one.stream.settled()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(take())
            await asyncio.sleep(0)
            with requests_of(served, monkeypatch) as seen:
                await one.stream.run(commands())
    assert seen[0].max_new_tokens >= 4


async def nobody(_response: pb.TranscribeResponse) -> None:
    """Takes events."""


async def test_what_is_dropped_is_not_read_again_before_the_next_segment(whisper_path, monkeypatch):
    """It was in the window of the next segment, after whose words the model wrote those that were dropped."""
    monkeypatch.setattr(transcription, "_MORE_TOKENS", 2)  # so that they fit before the next segment
    async with serving_bundles(whisper_path / "bundle") as served:
        for is_dropped in (False, True):
            one = direct(served, nobody)

            async def commands(one=one, is_dropped=is_dropped) -> AsyncIterator[bytes | Command]:
                yield pcm(noise(0.2))
                yield Command.FINISH_SEGMENT
                await one.stream.wait_until_transcribed(0.2)
                if is_dropped:
                    yield pcm(noise(0.1, 1))
                    yield Command.DROP_SEGMENT
                yield pcm(noise(0.2, 2))

            with requests_of(served, monkeypatch) as seen:
                whole = await one.stream.run(commands())
            assert whole.hypotheses[0].segments[0].words
            assert bool(seen[-1].prefix_ids) == (not is_dropped)


async def test_a_segment_to_which_nothing_is_said_after_the_one_before_is_decoded_alone(
    whisper_path, monkeypatch
):
    """A Whisper ended its target after the words of the segment before, so a whole sentence was lost."""
    words_of = LiveDecoder._words

    async def nothing_after_others(decoder, request, *given):
        return [] if request.prefix_ids else await words_of(decoder, request, *given)

    monkeypatch.setattr(LiveDecoder, "_words", nothing_after_others)
    monkeypatch.setattr(transcription, "_MORE_TOKENS", 2)  # so that they fit before the next segment
    async with serving_bundles(whisper_path / "bundle") as served:
        one = direct(served, nobody)

        async def commands() -> AsyncIterator[bytes | Command]:
            for seed in range(2):
                yield pcm(noise(0.2, seed))
                yield Command.FINISH_SEGMENT

        with requests_of(served, monkeypatch) as seen:
            whole = await one.stream.run(commands())
        assert any(request.prefix_ids for request in seen)
        assert len(whole.hypotheses[0].segments) == 2


@pytest.mark.parametrize("speaks", [True, False])
async def test_speech_after_the_last_word_of_a_segment_is_decoded_alone(speaks, whisper_path, monkeypatch):
    """A Whisper ended its target at a pause, and the half of an item of OpenAI's API was lost."""

    async def one_word(_decoder, _request, _result, begin, end):
        return [SpokenWord((5,), " a", begin, (begin + end) // 2)]

    monkeypatch.setattr(LiveDecoder, "_words", one_word)
    monkeypatch.setattr(transcription, "_speaks", lambda *_: speaks)
    monkeypatch.setattr(transcription, "_LEAST_REST_SECONDS", 0.2)
    async with serving_bundles(whisper_path / "bundle") as served:
        one = direct(served, nobody, interval_seconds=9)

        async def commands() -> AsyncIterator[bytes | Command]:
            yield pcm(noise(0.6))

        whole = await one.stream.run(commands())
    times = [(each.begin_seconds, each.end_seconds) for each in whole.hypotheses[0].segments]
    assert times == [(0, 0.3), (0.3, 0.45)][: 1 + speaks]


async def test_somebody_begins_to_speak_before_the_text_of_that_speech(whisper_path, monkeypatch):
    """Events of speech waited for a slow reader, while the next segment was decoded."""
    detect_by_loudness(monkeypatch)
    kinds, is_told, is_late = list[str](), asyncio.Event(), asyncio.Event()

    async def send(response: pb.TranscribeResponse) -> None:
        kinds.append(response.WhichOneof("event"))
        if kinds[-1] == "speech_ended" and not is_told.is_set():
            is_told.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await is_late.wait()
        elif kinds[-1] == "text":
            await is_told.wait()
            if "segment" in kinds:
                is_late.set()

    async with serving_bundles(whisper_path / "bundle") as served:
        options = pb.GenerateOptions(source_language="ko", no_speech_threshold=1, **ANYTHING_IS_GOOD)
        turns = pb.TurnDetection(silence_seconds=0.1, prefix_padding_seconds=0.1)
        one = direct(served, send, options=options, turn_detection=turns)
        loud = np.random.default_rng(0).uniform(-0.5, 0.5, 8_000)

        async def commands() -> AsyncIterator[bytes]:
            yield pcm(loud)
            async with asyncio.timeout(20):
                while "text" not in kinds:
                    await asyncio.sleep(0.01)
            yield pcm(np.concatenate([np.zeros(8_000), loud]))

        await one.stream.run(commands())
    assert kinds.count("speech_began") == 2
    second = len(kinds) - 1 - kinds[::-1].index("speech_began")
    assert "text" not in kinds[kinds.index("segment") : second]
    assert "text" in kinds[second:]


async def test_silence_does_not_name_a_language(whisper_path):
    """That of the first noise held for all that was said after it."""
    options = pb.GenerateOptions(no_speech_threshold=0, log_probability_threshold=0)
    content = pcm(noise(0.3))
    async with serving_bundles(whisper_path / "bundle") as served:
        finish = pb.TranscribeRequest(finish_segment=pb.FinishSegment())
        messages = [start(options=options, interval_seconds=10), sound(content), finish]
        result = (await answered(served.stub, messages))[-1].result
        assert not result.hypotheses[0].text
        assert result.detected_language == ""


async def test_a_text_that_is_used_again_is_not_a_decoding(whisper_path, monkeypatch):
    """The time of none was recorded, by which the server took more streams than it can decode."""
    detect_by_loudness(monkeypatch)
    for name, value in {"_FOLLOWED_SECONDS": 0, "_TOKENS_PER_SECOND": 0, "_MORE_TOKENS": 1}.items():
        monkeypatch.setattr(transcription, name, value)  # all words are stable, and few
    options = pb.GenerateOptions(source_language="ko", no_speech_threshold=1, **ANYTHING_IS_GOOD)
    async with serving_bundles(whisper_path / "bundle") as served:
        one = direct(served, nobody, options=options, turn_detection=None, interval_seconds=0.3)

        async def commands() -> AsyncIterator[bytes]:
            loud = np.random.default_rng(0).uniform(-0.5, 0.5, 4_000)
            content = pcm(np.concatenate([loud, np.zeros(24_000)]))
            for first in range(0, len(content), 1600):
                yield content[first : first + 1600]
                await one.stream.settled()

        with requests_of(served, monkeypatch) as seen:
            await one.stream.run(commands())
        assert one.statistics.num_live_decodings == len(seen) > 1


async def test_a_block_of_a_long_message_costs_what_it_takes(whisper_path):
    """Each block counted as much as its whole message, so that few callers filled the queue."""
    async with serving_bundles(whisper_path / "bundle") as served:
        one = direct(served, nobody, segments_only=True)

        async def commands() -> AsyncIterator[bytes]:
            yield pcm(noise(1)) * 20

        await one.stream.run(commands())
        assert sum(one.num_bytes) < 3 * 20 * SAMPLE_RATE
        assert max(one.num_bytes) <= 2**15


async def test_a_file_in_small_pieces_is_not_decoded_on_the_event_loop(whisper_path, monkeypatch):
    """Few bytes may be a long sound, and FFmpeg's thread was waited for."""
    content, threads = encoded(noise(1)), set[int]()
    blocks = sound_streams._FileStream._blocks

    def watched(stream):
        threads.add(threading.get_ident())
        return blocks(stream)

    monkeypatch.setattr(sound_streams._FileStream, "_blocks", watched)
    async with serving_bundles(whisper_path / "bundle") as served:
        pieces = [content[first : first + 500] for first in range(0, len(content), 500)]
        first = start(encoding=pb.SOUND_ENCODING_UNSPECIFIED, segments_only=True)
        await answered(served.stub, [first, *map(sound, pieces)])
    assert threads
    assert threading.get_ident() not in threads


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


@pytest.mark.parametrize(("seconds", "is_stable"), [(0.19, False), (0.5, True)])
async def test_words_that_sound_follows_are_stable_at_once_where_decodings_are_rare(
    seconds, is_stable, whisper_path, monkeypatch
):
    monkeypatch.setattr(transcription, "_FOLLOWED_SECONDS", 0.2)  # the model reads 0.64 seconds
    has_text, texts = asyncio.Event(), list[pb.LiveText]()

    async def sent() -> AsyncIterator[pb.TranscribeRequest]:
        yield start()
        yield sound(pcm(noise(seconds, 1)))
        await has_text.wait()

    async with serving_bundles(whisper_path / "bundle") as served:
        async for response in served.stub.Transcribe(sent()):
            if response.WhichOneof("event") == "text":
                texts.append(response.text)
                has_text.set()
    assert bool(texts[0].stable) == is_stable
    assert all(word.end_seconds <= seconds - 0.2 for word in texts[0].stable)
