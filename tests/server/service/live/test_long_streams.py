"""What a stream takes does not grow with its sound, its silence or the number of its pieces."""

import asyncio
import gc
import os
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from grpc import aio

from seq2seq_serve.bundle.audio import HOP, SAMPLE_RATE, GrowingSound
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub
from seq2seq_serve.server.service.live import stream as stream_module
from seq2seq_serve.server.service.live.hearing import Hearing
from seq2seq_serve.server.service.live.stream import LiveStream
from seq2seq_serve.server.service.live.turns import Turns
from tests.server.service.harness import Served, serving_bundles
from tests.server.service.live.test_stream import OFF, pcm, sound, start
from tests.server.service.live.test_turns import detect_by_loudness
from tests.server.service.seq2seq.test_windows import ANYTHING_IS_GOOD, SECONDS, noise

MOST_SECONDS = 65  # a minute that waits, a block of samples, and what is needed of the past
STATM = Path("/proc/self/statm")
OPTIONS = pb.GenerateOptions(source_language="ko", no_speech_threshold=1, **ANYTHING_IS_GOOD)
WITHOUT_TURNS = {"options": OPTIONS, "turn_detection": OFF}
SPEECH = {"options": OPTIONS, "turn_detection": None}
FILE = SPEECH | {"segments_only": True}
SILENCE = bytes(2 * SAMPLE_RATE)  # a second


@dataclass
class Heard:
    """What the streams of a test kept and did.

    Attributes:
        seconds: The most sound that was kept.
        spectrogram_seconds: The longest spectrogram that was kept.
        calls: Calls of functions, by name.
        streams: The streams that are still in memory.
    """

    seconds: float = 0.0
    spectrogram_seconds: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    streams: weakref.WeakSet[LiveStream] = field(default_factory=weakref.WeakSet)


@pytest.fixture
def heard(monkeypatch) -> Heard:
    """Watches the sounds of all streams, where what is loud is speech."""
    detect_by_loudness(monkeypatch)
    heard = Heard()

    class Watched(GrowingSound):
        def push(self, samples) -> None:
            super().push(samples)
            heard.seconds = max(heard.seconds, self._length / SAMPLE_RATE)
            heard.spectrogram_seconds = max(
                heard.spectrogram_seconds, sum(level.shape[1] for level in self._levels) * HOP / SAMPLE_RATE
            )

    def counted(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def call(*arguments, **settings):
            heard.calls[name] += 1
            return function(*arguments, **settings)

        monkeypatch.setattr(owner, name, call)

    counted(GrowingSound, "_computed")
    counted(Turns, "hear")
    counted(Hearing, "notify")
    begin = LiveStream.__init__

    def watch(self, *arguments) -> None:
        begin(self, *arguments)
        heard.streams.add(self)

    monkeypatch.setattr(LiveStream, "__init__", watch)
    monkeypatch.setattr(stream_module, "GrowingSound", Watched)
    return heard


@dataclass
class Answers:
    """What came of a stream whose answers nobody keeps.

    Attributes:
        kinds: Their number, by kind.
        result: The whole answer.
        grown: The most bytes by which this process grew.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    result: pb.GenerateResponse = field(default_factory=pb.GenerateResponse)
    grown: int = 0


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if STATM.exists() else 0


def num_descriptors() -> int:
    folder = Path("/proc/self/fd")
    return len([*folder.iterdir()]) if folder.exists() else 0


async def answered(
    served: Served, first: pb.TranscribeRequest, messages: Iterable[pb.TranscribeRequest]
) -> Answers:
    answers, before = Answers(), resident_bytes()

    async def sent() -> AsyncIterator[pb.TranscribeRequest]:
        yield first
        for message in messages:
            yield message

    most = (("grpc.max_receive_message_length", 2**24),)
    async with aio.insecure_channel(served.address, most) as channel:
        async for response in Seq2SeqStub(channel).Transcribe(sent()):
            kind = response.WhichOneof("event") or ""
            answers.kinds[kind] += 1
            if answers.kinds.total() % 100 == 0:
                answers.grown = max(answers.grown, resident_bytes() - before)
            if kind == "result":
                answers.result.CopyFrom(response.result)
    return answers


def speech(seconds: float) -> Iterator[pb.TranscribeRequest]:
    """Fifteen seconds of speech and five of silence, again and again."""
    spoken = [sound(pcm(noise(1, seed))) for seed in range(15)]
    turn = [*spoken, *[sound(SILENCE)] * 5]
    for second in range(round(seconds)):
        yield turn[second % len(turn)]


@pytest.mark.slow  # decodes two hours of sound
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(WITHOUT_TURNS | {"interval_seconds": 10}, id="live"),
        pytest.param(FILE, id="file"),
    ],
)
async def test_an_hour_takes_no_more_than_a_minute(whisper_path, heard, settings):
    """Each segment copied the text of the whole answer, and all copies stayed: gigabytes in some hours."""
    async with serving_bundles(whisper_path / "bundle") as served:
        await answered(served, start(**settings), speech(60))
        await served.until_calls_are_over()
        tasks, descriptors = len(asyncio.all_tasks()), num_descriptors()
        answers = await answered(served, start(**settings), speech(3600))
        await served.until_calls_are_over()
        assert answers.result.usage.source_seconds == 3600
        assert answers.kinds["segment"] > 3600 / 2
        assert len(asyncio.all_tasks()) <= tasks
        assert num_descriptors() < descriptors + 100  # gRPC has some of its own
        assert heard.seconds < MOST_SECONDS
        assert heard.spectrogram_seconds < MOST_SECONDS
        assert answers.grown < 2**27


@pytest.mark.parametrize("settings", [SPEECH, FILE], ids=["live", "file"])
@pytest.mark.parametrize("said_seconds", [0, 0.5, 1.5])
async def test_twenty_minutes_of_silence_are_not_kept_and_nothing_is_decoded(
    whisper_path, heard, settings, said_seconds
):
    """After speech all silence was kept: as context, or as a pause between two parts of a segment."""
    async with serving_bundles(whisper_path / "bundle") as served:
        said = [sound(pcm(noise(said_seconds)) + SILENCE)] if said_seconds else []
        answers = await answered(served, start(**settings), said)
        await served.until_calls_are_over()
        num_decoded = served.metric("seq2seq_request_success_total")
        again = await answered(served, start(**settings), [*said, *[sound(60 * SILENCE)] * 20])
        assert again.result.usage.source_seconds == pytest.approx(1200 + answers.result.usage.source_seconds)
        assert again.result.hypotheses == answers.result.hypotheses
        assert served.metric("seq2seq_request_success_total") == 2 * num_decoded
        assert (num_decoded > 0) == (said_seconds > 0)
        assert heard.seconds < MOST_SECONDS
        assert heard.spectrogram_seconds < MOST_SECONDS


@pytest.mark.parametrize("settings", [WITHOUT_TURNS, SPEECH, FILE], ids=["live", "turns", "file"])
async def test_a_second_in_single_bytes_takes_as_much_work_as_its_samples(whisper_path, heard, settings):
    content = pcm(noise(1))
    settings = settings | {"interval_seconds": 0.1}
    async with serving_bundles(whisper_path / "bundle") as served:
        pieces = [sound(content[place : place + 1]) for place in range(len(content))]
        await answered(served, start(**settings), pieces)
        num_samples = len(content) // 2
        assert heard.calls["hear"] <= num_samples + 1
        assert heard.calls["notify"] <= num_samples + 200
        num_decoded = served.metric("seq2seq_request_success_total")
        assert 0 < num_decoded <= 1 / 0.1 + 2 / SECONDS + 2
        # Four blocks of the spectrogram, and the last frames of each decoding
        assert heard.calls["_computed"] <= 4 + num_decoded


@pytest.mark.parametrize("settings", [SPEECH, FILE], ids=["live", "file"])
async def test_nothing_of_a_stream_that_has_ended_is_kept(whisper_path, heard, settings):
    """The timer of a stream kept it for five seconds."""
    async with serving_bundles(whisper_path / "bundle") as served:
        await answered(served, start(**settings), speech(3))
        await served.until_calls_are_over()
        gc.collect()
        assert not list(heard.streams)


async def test_only_sound_of_live_streams_counts_for_the_real_time_factor(whisper_path, heard):
    async with serving_bundles(whisper_path / "bundle") as served:
        await answered(served, start(**SPEECH), speech(3))
        await answered(served, start(**FILE), speech(5))
        assert served.metric("seq2seq_live_sound_seconds_total") == 3
