"""OpenAI's Realtime API, event by event, over a client of WebSockets that knows nothing of it."""

import asyncio
import base64
import json
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
import websockets
from websockets.asyncio.client import connect

from seq2seq_serve.bundle.audio import SAMPLE_RATE
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server import http as server_http
from seq2seq_serve.server.config import OpenAINames
from seq2seq_serve.server.engine.async_engine import AsyncEngine
from seq2seq_serve.server.errors import EngineFailed
from seq2seq_serve.server.service.live.stream import LiveStream
from seq2seq_serve.server.service.realtime import page
from tests.server.runner.test_voice_activity import needs_model, quiet, vowels
from tests.server.service.harness import access_file, serving, serving_bundles
from tests.server.service.seq2seq.test_windows import noise

COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"
FAILED = "conversation.item.input_audio_transcription.failed"
COMMITTED = "input_audio_buffer.committed"
OF_16_KHZ = {"format": {"type": "audio/pcm", "rate": SAMPLE_RATE}}  # which the server takes, too
BY_HAND = {**OF_16_KHZ, "turn_detection": None, "transcription": {"model": "bundle", "language": "ko"}}
BY_SPEECH = {**OF_16_KHZ, "transcription": {"model": "bundle", "language": "ko"}}


def pcm(samples) -> bytes:
    return (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()


class Talk:
    """A session of a client. `events` has all that came, in order."""

    def __init__(self, socket):
        self.socket, self.events = socket, []

    async def send(self, kind, **fields):
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def append(self, sound: bytes, piece_bytes: int = 4000):
        for first in range(0, len(sound), piece_bytes):
            audio = base64.b64encode(sound[first : first + piece_bytes]).decode()
            await self.send("input_audio_buffer.append", audio=audio)

    async def update(self, audio_input, **fields):
        session = {"type": "transcription", "audio": {"input": audio_input}}
        await self.send("session.update", session=session, **fields)
        return await self.next("session.updated")

    async def next(self, kind):
        """The next event of a kind."""
        async with asyncio.timeout(30):
            while True:
                event = json.loads(await self.socket.recv())
                assert event["event_id"]
                self.events.append(event)
                if event["type"] == kind:
                    return event
                assert event["type"] != "error", event

    async def error(self):
        """The next error."""
        async with asyncio.timeout(30):
            while (event := json.loads(await self.socket.recv()))["type"] != "error":
                self.events.append(event)
        return event["error"]

    async def until_closed(self) -> int:
        async with asyncio.timeout(30):
            while True:
                try:
                    self.events.append(json.loads(await self.socket.recv()))
                except websockets.ConnectionClosed as closed:
                    return closed.rcvd.code

    def texts(self):
        """The joined deltas of each item whose text is complete, which are its transcript."""
        joined = {}
        for event in self.events:
            if event["type"] == DELTA:
                joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
        completed = [event for event in self.events if event["type"] == COMPLETED]
        for event in completed:
            assert event["transcript"] == joined.get(event["item_id"], "")
            assert event["content_index"] == 0
        return [event["transcript"] for event in completed]

    def kinds(self):
        return [event["type"] for event in self.events]


@asynccontextmanager
async def talking(served, query="intent=transcription", **options):
    url = f"ws://127.0.0.1:{served.app.http.port}/v1/realtime?{query}"
    async with connect(url, **{"compression": None} | options) as socket:
        talk = Talk(socket)
        yield talk


async def over(served):
    """Waits until the sessions have ended, and the engine has heard of it."""
    await served.until_calls_are_over()
    async with asyncio.timeout(20):
        while served.metric("seq2seq_num_requests_waiting") or served.metric("seq2seq_num_requests_running"):
            await asyncio.sleep(0.001)


@asynccontextmanager
async def session(whisper_path, audio_input=BY_HAND, **changes):
    """A server with a small Whisper, and a session with these settings."""
    async with serving_bundles(whisper_path / "bundle", **changes) as served:
        async with talking(served) as talk:
            await talk.next("session.created")
            await talk.update(audio_input)
            yield served, talk
        await over(served)
    assert not served.app.calls.live.open.held
    assert not served.app.calls.streams.held


async def test_a_turn_that_the_caller_commits_has_every_event(whisper_path):
    async with session(whisper_path) as (_, talk):
        created, updated = talk.events
        assert created["session"]["object"] == "realtime.transcription_session"
        assert created["session"]["audio"]["input"]["turn_detection"]["type"] == "server_vad"
        assert updated["session"]["id"] == created["session"]["id"]
        assert updated["session"]["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": SAMPLE_RATE}
        assert updated["session"]["audio"]["input"]["turn_detection"] is None
        await talk.append(pcm(noise(0.6)))
        await talk.send("input_audio_buffer.commit")
        committed = await talk.next(COMMITTED)
        assert committed["previous_item_id"] is None
        done = await talk.next("conversation.item.done")
        assert done["item"]["id"] == committed["item_id"]
        assert done["item"]["content"] == [{"type": "input_audio", "transcript": None}]
        completed = await talk.next(COMPLETED)
        assert completed["usage"] == {"type": "duration", "seconds": 0.6}
        await talk.append(pcm(noise(1.6, seed=1)))  # longer than the model reads at once
        await talk.send("input_audio_buffer.commit")
        assert (await talk.next(COMMITTED))["previous_item_id"] == committed["item_id"]
        assert (await talk.next(COMPLETED))["usage"]["seconds"] == 1.6
        assert "conversation.item.added" in talk.kinds()
        assert "conversation.item.created" not in talk.kinds()
        assert any(talk.texts())


async def test_the_pieces_of_a_sound_and_its_encoding_do_not_matter(whisper_path):
    texts = []
    samples = noise(0.6)
    for piece_bytes in (1001, 10**6):  # an odd number of bytes, too
        async with session(whisper_path) as (_, talk):
            await talk.append(pcm(samples), piece_bytes)
            await talk.send("input_audio_buffer.commit")
            await talk.next(COMPLETED)
            texts += talk.texts()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("sound", "num_bytes"),
    [({"type": "audio/pcmu"}, 8_000), ({"type": "audio/pcma"}, 8_000), ({"type": "audio/pcm"}, 48_000)],
)
async def test_a_second_of_every_encoding_is_one(whisper_path, sound, num_bytes):
    async with session(whisper_path, BY_HAND | {"format": sound}) as (_, talk):
        await talk.append(np.random.default_rng(0).bytes(num_bytes))
        await talk.send("input_audio_buffer.commit")
        assert (await talk.next(COMPLETED))["usage"]["seconds"] == pytest.approx(1, abs=0.05)


@needs_model
async def test_speech_begins_and_ends_items_at_times_of_the_session(whisper_path):
    async with session(whisper_path, BY_SPEECH) as (_, talk):
        sound = np.concatenate([quiet(0.7), vowels(0), quiet(1.5), vowels(0), quiet(1.5)])
        await talk.append(pcm(sound))
        await talk.send("input_audio_buffer.commit")  # after the end of speech
        kinds = talk.kinds()
        while kinds.count("input_audio_buffer.speech_stopped") + 1 != kinds.count(COMPLETED):
            completed = await talk.next(COMPLETED)
            kinds = talk.kinds()
        assert talk.texts()[-1] == completed["transcript"] == ""
        began = [one for one in talk.events if one["type"] == "input_audio_buffer.speech_started"]
        ended = [one for one in talk.events if one["type"] == "input_audio_buffer.speech_stopped"]
        committed = [one["item_id"] for one in talk.events if one["type"] == COMMITTED]
        assert len(ended) >= 2
        assert committed[:-1] == [one["item_id"] for one in began] == [one["item_id"] for one in ended]
        places = [(one["audio_start_ms"], two["audio_end_ms"]) for one, two in zip(began, ended, strict=True)]
        all_places = [place for pair in places for place in pair]
        assert all_places == sorted(all_places)
        assert 300 <= all_places[0] <= 900
        usages = [one["usage"]["seconds"] for one in talk.events if one["type"] == COMPLETED]
        for seconds, (begin, end) in zip(usages, places, strict=False):
            assert 0.5 <= seconds == pytest.approx((end - begin) / 1000, abs=0.01)
        # in another stream, with other settings
        await talk.update({"turn_detection": {"type": "server_vad", "silence_duration_ms": 300}})
        await talk.append(pcm(np.concatenate([vowels(0), quiet(1.5)])))
        begin = await talk.next("input_audio_buffer.speech_started")
        assert begin["audio_start_ms"] >= 1000 * len(sound) // SAMPLE_RATE
        await talk.next(COMPLETED)


@needs_model
async def test_a_commit_while_somebody_speaks_ends_the_item_there(whisper_path):
    async with session(whisper_path, BY_SPEECH) as (_, talk):
        await talk.append(pcm(np.concatenate([quiet(0.5), vowels(0)[:16_000]])))
        await talk.next("input_audio_buffer.speech_started")
        await talk.send("input_audio_buffer.commit")
        await talk.next(COMPLETED)
        await talk.append(pcm(np.concatenate([vowels(0)[:16_000], quiet(1.5)])))
        await talk.next("input_audio_buffer.speech_stopped")
        await talk.next(COMPLETED)
        assert len(talk.texts()) == 2


async def test_new_settings_hold_from_the_next_item_on(whisper_path):
    async with session(whisper_path) as (_, talk):
        await talk.append(pcm(noise(0.3)))
        updated = await talk.update({"transcription": {"language": "en"}})
        assert updated["session"]["audio"]["input"]["transcription"] == {
            "model": "bundle",
            "language": "en",
            "prompt": "",
        }
        await talk.append(pcm(noise(0.3)))
        assert COMPLETED not in talk.kinds()
        await talk.send("input_audio_buffer.commit")
        await talk.next(COMPLETED)
        await talk.append(pcm(noise(0.6)))
        await talk.send("input_audio_buffer.commit")
        assert (await talk.next(COMPLETED))["usage"]["seconds"] == pytest.approx(0.6, abs=0.011)
        assert len(talk.texts()) == 2


async def test_another_encoding_ends_the_item_at_once(whisper_path):
    async with session(whisper_path) as (_, talk):
        await talk.append(pcm(noise(0.5)))
        await talk.update({"format": {"type": "audio/pcmu"}})
        completed = await talk.next(COMPLETED)
        assert completed["usage"]["seconds"] == 0.5
        await talk.append(bytes(4000))
        await talk.send("input_audio_buffer.commit")
        assert (await talk.next(COMPLETED))["usage"]["seconds"] == pytest.approx(0.5, abs=0.05)


async def test_what_is_cleared_is_not_transcribed(whisper_path):
    async with session(whisper_path) as (_, talk):
        await talk.append(pcm(noise(0.5)))
        await talk.send("input_audio_buffer.clear")
        await talk.next("input_audio_buffer.cleared")
        await talk.send("input_audio_buffer.commit", event_id="mine")
        error = await talk.error()
        assert "append at least 100 ms" in error["message"]
        assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "mine")
        await talk.append(pcm(noise(0.5)))
        await talk.send("input_audio_buffer.commit")
        assert (await talk.next(COMPLETED))["usage"]["seconds"] == 0.5
        assert talk.kinds().count(COMPLETED) == 1


async def test_text_that_comes_before_a_segment_is_dropped_is_not_that_of_the_next_item(
    whisper_path, monkeypatch
):
    """It began an item of its own, which had the next sound, too."""
    hear = LiveStream._hear

    async def hear_slowly(stream, blocks, num_bytes):
        await hear(stream, blocks, num_bytes)
        if not num_bytes and stream.heard_seconds == 0.5:
            await stream._send(pb.LiveText(stable=[pb.Word(text=" dropped")]))

    monkeypatch.setattr(LiveStream, "_hear", hear_slowly)
    async with session(whisper_path) as (_, talk):
        await talk.append(pcm(noise(0.5)), 10**6)
        await talk.send("input_audio_buffer.clear")
        await talk.next("input_audio_buffer.cleared")
        await talk.append(pcm(noise(0.4)))
        await talk.send("input_audio_buffer.commit")
        assert "dropped" not in (await talk.next(COMPLETED))["transcript"]


async def test_what_openai_s_clients_send_and_the_server_lacks_does_not_refuse_the_rest(whisper_path):
    async with session(whisper_path) as (_, talk):
        await talk.send(
            "session.update",
            session={
                "type": "transcription",
                "include": ["item.input_audio_transcription.logprobs"],
                "audio": {
                    "input": {
                        "noise_reduction": {"type": "near_field"},
                        "transcription": {"language": "en", "delay": "low", "keywords": ["a"]},
                        "turn_detection": {
                            "type": "semantic_vad",
                            "eagerness": "low",
                            "create_response": True,
                        },
                    }
                },
            },
        )
        session_ = (await talk.next("session.updated"))["session"]
        assert session_["include"] is None
        sound = session_["audio"]["input"]
        assert sound["noise_reduction"] is None
        assert sound["transcription"] == {"model": "bundle", "language": "en", "prompt": ""}
        assert sound["turn_detection"]["type"] == "server_vad"
        await talk.update({"turn_detection": None})
        await talk.append(pcm(noise(0.4)))
        await talk.send("input_audio_buffer.commit", last=True)
        await talk.next(COMPLETED)


async def test_the_older_form_of_the_api_is_answered_in_that_form(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        protocols = ["realtime", "openai-insecure-api-key.any", "openai-beta.realtime-v1"]
        async with talking(served, subprotocols=protocols) as talk:
            assert talk.socket.subprotocol == "realtime"
            created = await talk.next("transcription_session.created")
            assert created["session"]["input_audio_format"] == "pcm16"
            older = {
                "input_audio_format": "g711_ulaw",
                "input_audio_transcription": {"model": "whisper-1", "language": "ko", "prompt": ""},
                "turn_detection": None,
                "input_audio_noise_reduction": {"type": "near_field"},
                "include": ["item.input_audio_transcription.logprobs"],
            }
            await talk.send("transcription_session.update", session=older)
            session = (await talk.next("transcription_session.updated"))["session"]
            assert session["input_audio_format"] == "g711_ulaw"
            assert session["input_audio_transcription"]["language"] == "ko"
            assert session["turn_detection"] is None
            await talk.append(bytes(4000))
            await talk.send("input_audio_buffer.commit")
            await talk.next("conversation.item.created")
            await talk.next(COMPLETED)


def in_input(**fields):
    return {"session": {"type": "transcription", "audio": {"input": fields}}}


@pytest.mark.parametrize(
    ("event", "param", "match"),
    [
        ("{", "", "the event is not JSON in UTF-8"),
        ("[]", "", "the event must be a JSON object"),
        (b"\xff", "", "the event is not JSON in UTF-8"),
        (
            {"type": "response.create"},
            "type",
            "the type of the event is 'response.create', and must be one of",
        ),
        ({"type": ["a"]}, "type", "must be one of session.update"),
        ({"type": "input_audio_buffer.append", "audio": "%"}, "audio", "audio must be base64"),
        ({"type": "input_audio_buffer.append", "audio": "ä"}, "audio", "audio must be base64"),
        ({"type": "input_audio_buffer.append"}, "audio", "audio must be base64: it is not a text"),
        ({"type": "input_audio_buffer.clear", "event_id": 3}, "event_id", "event_id must be a text"),
        ({"type": "session.update"}, "session", "session must be an object"),
        (in_input(format=3), "session.audio.input.format", "must be an object"),
        (
            {"session": {"type": "realtime"}},
            "session.type",
            "session.type is 'realtime', and must be transcription",
        ),
        ({"session": {"voice": "alloy"}}, "session.voice", "is not a field that this server knows"),
        (
            in_input(turn_detection={"type": "loud"}),
            "session.audio.input.turn_detection.type",
            "is 'loud', and must be server_vad or semantic_vad",
        ),
        (
            in_input(turn_detection={"type": "server_vad", "silence_duration_ms": 5}),
            "session.audio.input.turn_detection.silence_duration_ms",
            "is '5', and must be a number from 100 to 10000",
        ),
        (
            in_input(turn_detection={"type": "server_vad", "threshold": float("nan")}),
            "session.audio.input.turn_detection.threshold",
            "is 'nan'",
        ),
        (in_input(format={"type": "audio/mp3"}), "session.audio.input.format.type", "must be audio/pcm or"),
        (in_input(format={"type": "audio/pcm", "rate": 1}), "rate", "the sound has 1 channels of 1 samples"),
        (in_input(transcription={"hurry": 1}), "session.audio.input.transcription.hurry", "leave it out"),
        (in_input(transcription={"language": "fr"}), "language", "language is 'fr'"),
        (in_input(transcription={"model": "other"}), None, "no model is named 'other'"),
        (
            in_input(transcription={"prompt": "x" * 2**17}),
            "session.audio.input.transcription.prompt",
            "at most",
        ),
    ],
)
async def test_a_wrong_event_is_an_error_and_the_session_goes_on(whisper_path, event, param, match):
    async with session(whisper_path) as (_, talk):
        if isinstance(event, dict):
            event = json.dumps({"type": "session.update", "event_id": "mine", **event})
        await talk.socket.send(event)
        error = await talk.error()
        assert match in error["message"]
        assert error["param"] == (param or None)
        assert error["type"] == "invalid_request_error"
        if "mine" in str(event):
            assert error["event_id"] == "mine"
        await talk.append(pcm(noise(0.5)))
        await talk.send("input_audio_buffer.commit")
        await talk.next(COMPLETED)


async def test_the_model_is_that_of_the_query_or_the_only_one(whisper_path):
    sound = {"transcription": {"language": "ko"}, "turn_detection": None, **OF_16_KHZ}
    async with serving_bundles(whisper_path / "bundle", openai_names=OpenAINames.ANY) as served:
        for query in ("intent=transcription", "model=bundle", "model=gpt-4o-transcribe&intent=transcription"):
            async with talking(served, query) as talk:
                await talk.next("session.created")
                await talk.update(sound)
                await talk.append(pcm(noise(0.5)))
                await talk.send("input_audio_buffer.commit")
                await talk.next(COMPLETED)
        await over(served)
        assert served.metric("seq2seq_requests_total", method="Transcribe", code="OK") == 3


@pytest.mark.parametrize(
    ("query", "options", "status", "code"),
    [
        ("intent=conversation", {}, 400, "INVALID_REQUEST"),
        ("model=other", {}, 404, "UNKNOWN_MODEL"),
        ("", {"origin": "https://other.example"}, 403, "FORBIDDEN"),
        ("", {"additional_headers": {"x-request-id": "a=b"}}, 400, "INVALID_REQUEST"),
    ],
)
async def test_a_session_that_cannot_be_is_refused_by_a_status(
    whisper_path, query, options, status, code, caplog
):
    async with serving_bundles(whisper_path / "bundle") as served:
        with pytest.raises(websockets.InvalidStatus) as caught:
            await talking(served, query, **options).__aenter__()
        response = caught.value.response
        assert response.status_code == status
        assert json.loads(response.body)["error"]["code"] == code
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_pages_of_allowed_origins_may_connect(whisper_path):
    origin = "https://app.example"
    async with (
        serving_bundles(whisper_path / "bundle", allowed_origins=origin) as served,
        talking(served, origin=origin) as talk,
    ):
        await talk.next("session.created")


async def test_rights_are_those_of_a_header_or_of_a_subprotocol(tmp_path, whisper_path):
    file = access_file(tmp_path, ("shop", "secret", "predict"), ("ops", "other", "admin"))
    async with serving_bundles(whisper_path / "bundle", access_file=file) as served:
        for options, status in (
            ({}, 401),
            ({"additional_headers": {"Authorization": "Bearer wrong"}}, 401),
            ({"additional_headers": {"Authorization": "Bearer other"}}, 403),
            ({"subprotocols": ["realtime", "openai-insecure-api-key.wrong"]}, 401),
        ):
            with pytest.raises(websockets.InvalidStatus) as caught:
                await talking(served, **options).__aenter__()
            assert caught.value.response.status_code == status
        async with talking(served, additional_headers={"Authorization": "Bearer secret"}) as talk:
            await talk.next("session.created")
            assert talk.socket.subprotocol is None
        protocols = ["realtime", "openai-insecure-api-key.secret"]
        async with talking(served, subprotocols=protocols) as talk:
            await talk.next("session.created")
            assert talk.socket.subprotocol == "realtime"
        assert served.metric("seq2seq_requests_total", method="Transcribe", code="UNAUTHENTICATED") == 3


async def test_a_caller_with_too_many_sessions_is_refused(whisper_path, monkeypatch):
    monkeypatch.setattr(page, "_MOST_SESSIONS", 1)
    server = serving_bundles(whisper_path / "bundle", max_live_streams=1)
    async with server as served, talking(served) as talk:
        await talk.next("session.created")
        with pytest.raises(websockets.InvalidStatus) as caught:
            await talking(served).__aenter__()
        assert caught.value.response.status_code == 429
        assert caught.value.response.headers["retry-after"]


async def test_more_live_sound_than_the_server_takes_is_an_error(whisper_path):
    async with session(whisper_path, max_live_streams=1) as (served, talk):
        async with talking(served) as other:
            await other.next("session.created")
            await other.update(BY_HAND)
            await talk.append(pcm(noise(0.2)))
            await talk.update(BY_HAND)
            await other.append(pcm(noise(0.5)), 800)
            error = await other.error()
            assert (error["type"], error["code"]) == ("rate_limit_error", "OVERLOADED")
            await other.update(BY_HAND)  # there is no second error for what was appended before
            with pytest.raises(websockets.InvalidStatus, match="429"):
                await talking(served).__aenter__()
        await talk.send("input_audio_buffer.commit")
        await talk.next(COMPLETED)


async def test_what_was_heard_is_finished_when_the_server_drains(whisper_path):
    async with session(whisper_path) as (served, talk):
        await talk.append(pcm(noise(0.6)))
        await talk.send("input_audio_buffer.commit")
        await talk.next(COMMITTED)
        await talk.append(pcm(noise(0.4)))
        await served.app.drain()
        assert await talk.until_closed() == 1001
        assert len(talk.texts()) >= 1
        assert talk.kinds().count(COMMITTED) == talk.kinds().count(COMPLETED)


async def test_an_idle_session_ends_when_the_server_drains(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served, talking(served) as talk:
        await talk.next("session.created")
        await served.app.drain()
        assert await talk.until_closed() == 1001
        await over(served)
        assert served.metric("seq2seq_requests_total", method="Transcribe", code="UNAVAILABLE") == 1


async def test_a_caller_who_leaves_frees_everything(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        async with talking(served) as talk:
            await talk.next("session.created")
            await talk.update(BY_HAND)
            await talk.append(pcm(noise(60)), 2**17)
            talk.socket.transport.abort()
        await over(served)
        assert not served.app.calls.live.open.held
        assert served.metric("seq2seq_requests_total", method="Transcribe", code="CANCELLED") == 1


async def test_a_decoding_that_fails_is_reported_with_its_item(whisper_path, monkeypatch):
    async with session(whisper_path) as (_, talk):

        def fail(*_arguments, **_options):
            raise EngineFailed("a step failed")

        with monkeypatch.context() as patches:
            patches.setattr(AsyncEngine, "submitted", fail)
            await talk.append(pcm(noise(0.5)))
            await talk.send("input_audio_buffer.commit")
            failed = await talk.next(FAILED)
        assert failed["error"]["type"] == "server_error"
        assert failed["error"]["message"] == "a step failed"
        committed = [event["item_id"] for event in talk.events if event["type"] == COMMITTED]
        assert failed["item_id"] in committed
        assert (await talk.error())["message"] == "a step failed"
        await talk.append(pcm(noise(0.5)))
        await talk.send("input_audio_buffer.commit")
        await talk.next(COMPLETED)


async def test_a_message_over_the_limit_closes_the_socket(whisper_path):
    async with session(whisper_path) as (_, talk):
        with suppress(websockets.ConnectionClosed):
            await talk.socket.send("x" * (server_http.MAX_MESSAGE_BYTES + 1))
        assert await talk.until_closed() == 1009


async def test_one_long_message_is_read(whisper_path):
    async with session(whisper_path) as (_, talk):
        await talk.append(pcm(noise(60)), 2**24)
        await talk.send("input_audio_buffer.clear")
        await talk.next("input_audio_buffer.cleared")


async def test_a_message_in_too_many_frames_closes_the_socket(whisper_path):
    async with session(whisper_path) as (_, talk):

        async def send():
            async def frames():
                for _ in range(5000):
                    yield ""
                await asyncio.Event().wait()

            with suppress(websockets.ConnectionClosed):
                await talk.socket.send(frames())

        sending = asyncio.create_task(send())
        assert await talk.until_closed() == 1009
        sending.cancel()


async def test_other_pages_do_not_become_sockets(whisper_path):
    async with serving_bundles(whisper_path / "bundle") as served:
        status, text = await served.http("/v1/realtime")
        assert status == 404
        assert "over a WebSocket /v1/realtime" in text
        with pytest.raises(websockets.InvalidStatus, match="404"):
            await connect(f"ws://127.0.0.1:{served.app.http.port}/v1/other")
    async with serving() as served:
        with pytest.raises(websockets.InvalidStatus, match="400"):
            await talking(served, "model=echo").__aenter__()
