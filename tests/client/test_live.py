"""`AsyncClient.transcribe_live`, against a server with a small Whisper."""

import asyncio
import io

import numpy as np
import pytest
import soundfile

from seq2seq_serve.client import (
    AsyncClient,
    ClientError,
    FinishSegment,
    LiveResult,
    LiveSegment,
    LiveText,
    TurnDetection,
)
from tests.server.service.harness import on_a_thread, serving_bundles

OFF = TurnDetection(off=True)
SECONDS = 1.5  # the model takes 0.64


@pytest.fixture(scope="module")
def server(whisper_path):
    with on_a_thread(serving_bundles(whisper_path / "bundle")) as served:
        yield served


@pytest.fixture
def sound() -> bytes:
    samples = np.random.default_rng(0).standard_normal(int(SECONDS * 16_000)) * 0.1
    return (samples * 2**15).astype("<i2").tobytes()


async def pieces(content: bytes, num_bytes: int = 3_200):
    for first in range(0, len(content), num_bytes):
        yield content[first : first + num_bytes]


async def events_of(server, chunks, **settings) -> list:
    settings = {"encoding": "pcm_s16", "turn_detection": OFF, "interval_seconds": 0.1} | settings
    async with AsyncClient(server.address) as client:
        return [event async for event in client.transcribe_live(chunks, **settings)]


def segments_of(events) -> list[str]:
    return [event.text for event in events if isinstance(event, LiveSegment)]


async def test_words_become_stable_then_segments_and_the_last_event_has_all(server, sound):
    *events, last = await events_of(server, pieces(sound))
    assert isinstance(last, LiveResult)
    assert last.received_seconds == last.answer.usage.source_seconds == SECONDS
    assert len(segments_of(events)) >= 3
    assert last.text == " ".join(filter(None, segments_of(events)))
    stable = ""
    for event in events:
        if isinstance(event, LiveText):
            stable += event.text
        if isinstance(event, LiveSegment):
            said = event.segment.text.strip()
            assert stable.lstrip().startswith(said)
            stable = stable.lstrip()[len(said) :]
    assert stable == ""


async def test_segments_only_are_those_of_the_whole_sound_and_can_be_continued(server, sound):
    *events, _ = await events_of(server, pieces(sound), segments_only=True)
    assert {type(event) for event in events} == {LiveSegment}
    assert len(events) >= 3
    begin_seconds = events[-2].segment.end_seconds + 0.001
    *rest, _ = await events_of(server, pieces(sound), segments_only=True, begin_seconds=begin_seconds)
    assert 1 <= len(rest) < len(events)
    assert [event.segment for event in rest] == [event.segment for event in events[-len(rest) :]]


async def test_a_file_with_a_header_needs_no_description(server, sound):
    stream = io.BytesIO()
    soundfile.write(stream, np.frombuffer(sound, "<i2"), 16_000, format="FLAC")
    raw = await events_of(server, pieces(sound), segments_only=True)
    file = await events_of(server, pieces(stream.getvalue(), 700), encoding="file", segments_only=True)
    assert segments_of(file) == segments_of(raw)


async def test_the_caller_can_finish_a_segment(server, sound):
    async def chunks():
        yield sound[:6_400]
        yield FinishSegment()
        yield sound[6_400:12_800]

    *events, _ = await events_of(server, chunks(), segments_only=True)
    assert max(event.segment.end_seconds for event in events) <= 0.4
    assert any(event.segment.begin_seconds >= 0.2 for event in events)
    assert all(event.segment.end_seconds <= 0.2 or event.segment.begin_seconds >= 0.2 for event in events)


async def test_a_caller_that_stops_early_frees_the_call_and_the_chunks(server, sound):
    has_ended = asyncio.Event()

    async def chunks():
        try:
            yield sound
            await asyncio.Event().wait()  # a stream that stays open
        finally:
            has_ended.set()

    async with AsyncClient(server.address, timeout_seconds=20) as client:
        events = client.transcribe_live(chunks(), encoding="pcm_s16", turn_detection=OFF)
        await anext(events)
        await events.aclose()
        assert has_ended.is_set()
        task = asyncio.create_task(anext(client.transcribe_live(chunks(), encoding="mulaw", model="whisper")))
        has_ended.clear()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(20):
            while server.app.calls.live.open.held.total():
                await asyncio.sleep(0.01)


async def test_an_error_of_the_chunks_ends_the_call_and_is_raised(server, sound):
    async def chunks():
        yield sound
        raise OSError("the microphone was pulled out")

    with pytest.raises(OSError, match="pulled out"):
        await events_of(server, chunks())


async def test_the_deadline_of_other_calls_is_not_that_of_a_stream(server, sound):
    async with AsyncClient(server.address, timeout_seconds=-1.0) as client:
        with pytest.raises(ClientError, match="DEADLINE_EXCEEDED"):
            await client.models()
        events = client.transcribe_live(pieces(sound), encoding="pcm_s16", turn_detection=OFF)
        *_, last = [event async for event in events]
        assert isinstance(last, LiveResult)
        with pytest.raises(ClientError, match="DEADLINE_EXCEEDED"):
            await anext(client.transcribe_live(pieces(sound), timeout_seconds=-1.0))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"encoding": "pcm_s24"}, ValueError, "'pcm_s24', and must be one of file, pcm_s16"),
        ({"model": "none"}, ClientError, "NOT_FOUND"),
        ({"begin_seconds": 1.0}, ClientError, "needs segments_only"),
        ({"options": {"num_hypotheses": 2}}, ClientError, "num_hypotheses does not apply to a stream"),
        ({"encoding": "file"}, ClientError, "name the encoding of samples without a header"),
    ],
)
async def test_what_is_wrong_is_reported_and_the_sound_may_go_on(server, sound, settings, error, message):
    async def endless():
        while True:
            yield sound

    with pytest.raises(error, match=message):
        await events_of(server, endless(), **settings)


async def test_the_reason_of_the_server_arrives_while_sound_is_sent(server, sound):
    """In one of five calls it was INTERNAL, gRPC's report on the message that could not be sent any more."""

    async def endless():
        while True:
            yield sound

    for _ in range(20):
        with pytest.raises(ClientError, match="INVALID_ARGUMENT: the sound is not"):
            await events_of(server, endless(), encoding="file")


async def test_a_server_that_is_gone_is_reported_as_by_other_calls(sound):
    async with AsyncClient("localhost:1") as client:
        with pytest.raises(ClientError, match="UNAVAILABLE: no server answers at localhost:1"):
            await anext(client.transcribe_live(pieces(sound)))
