"""Measures live speech: `python -m benchmarks.live BUNDLE`, a checkpoint of Whisper.

The sounds are sentences of `quality/spoken.txt` that `espeak-ng` speaks with pauses, half of them in noise.
Parts, of which `--only` takes some:

    quality  Each sound comes in tenths of a second, on a clock that waits for every decoding: the text then
             depends on nothing but the sound. Wrong words, in any spelling, beside those of the whole file by
             windows and by `split`, with voice activity; and words that were taken back.
    lag      Streams at the pace of the sound, to a server over gRPC: from the end of a word until it is
             stable, on the real clock, and the server's processor time for a second of sound.
    beside   Files that are transcribed beside four streams: their tokens/s over those without streams, and
             over the share of the processor that the streams leave.
    peers    Wrong words, and processor time for a second of sound, of one stream here and of the packages in
             `live_peers`, one after the other.

The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from grpc import aio
from rapidfuzz.distance import Levenshtein

from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware
from benchmarks.live_peers import whisper_live, whisper_streaming
from benchmarks.quality.lost_speech import Plan, as_spoken, speak, words
from benchmarks.report import bar, command, markdown, publish
from benchmarks.serving import serving
from seq2seq_serve import load
from seq2seq_serve.bundle.audio import SAMPLE_RATE, Samples, read_sound
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub
from seq2seq_serve.server.config import RunnerConfig, ServerConfig
from seq2seq_serve.server.models.loading import load_model
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.call import Call
from seq2seq_serve.server.service.live.admission import LiveStreams
from seq2seq_serve.server.service.live.stream import LiveStream
from seq2seq_serve.server.telemetry.record import Caller
from seq2seq_serve.server.telemetry.statistics import Statistics

_PARTS = ("quality", "lag", "beside", "peers")
_PLANS = (
    Plan(60, (0.3, 0.6)),
    Plan(60, (0.3, 1.0), noise=15),
    Plan(60, (0.3, 2, 4)),
    Plan(60, (0.1, 0.3), has_one_voice=False),
    Plan(60, (0.3, 0.6, 1, 4), noise=10),
    Plan(60, (0.5, 1, 3)),
    Plan(60, (0.2, 0.5), noise=20, has_one_voice=False),
    Plan(60, (0.4, 0.8, 6)),
    Plan(60, (0.1, 0.4), noise=15),
    Plan(60, (0.3, 0.6, 1), has_one_voice=False),
)
_CHUNK_SECONDS = 0.1
_STREAMS_BESIDE, _FILES_BESIDE = 4, 4  # at once
_WHOLE: dict[str, dict[str, Any]] = {
    "windows": {"long_source": "sequential", "voice_activity": True},
    "split": {"long_source": "split", "voice_activity": True, "timestamps": True},
}


class Sound(NamedTuple):
    """A spoken text."""

    path: Path
    samples: Samples
    text: str

    @property
    def content(self) -> bytes:
        """Its samples, 16 bits each."""
        return np.rint(np.clip(self.samples, -1, 1) * 32767).astype("<i2").tobytes()

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.samples) / SAMPLE_RATE


def main() -> int:
    """Measure, and print one JSON object; returns 0 if every bar is met."""
    parser = command(
        "live", __doc__, "bundles/tiny.en --out benchmarks/results/X.json\nbundles/tiny.en --only lag"
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--only", choices=_PARTS, nargs="+", help="parts (default: quality and lag)")
    parser.add_argument("--precision", default="fp32", help="(default: %(default)s)")
    parser.add_argument("--streams", default="1,8", help="at once, for the lag (default: %(default)s)")
    parser.add_argument(
        "--sounds", type=positive, default=len(_PLANS), help="a minute each (default: %(default)s)"
    )
    parser.add_argument(
        "--recording", type=Path, help="another sound, and its text in a file of the ending .txt"
    )
    parser.add_argument("--weights", type=Path, help="the same weights for faster-whisper, for `peers`")
    parser.add_argument(
        "--whisper-live", type=Path, metavar="PYTHON", help="of an environment that has it, for `peers`"
    )
    options = parser.parse_args()
    parts = options.only or _PARTS[:2]
    report: dict[str, Any] = {
        "benchmark": "live",
        "hardware": describe_hardware(),
        "bundle": options.bundle.name,
        "precision": options.precision,
    }
    bars: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="live-") as folder:
        sounds = _sounds(Path(folder), options)
        report["seconds"] = sum(sound.seconds for sound in sounds)
        if "quality" in parts:
            report["quality"] = quality = _quality(sounds, options)
            bars.append(bar("words taken back", quality["revoked"], 0, is_least=False))
            more = quality["live"] - min(quality[way] for way in _WHOLE)
            bars.append(bar("wrong words beyond the whole file's, points", more, 1, is_least=False))
        if "lag" in parts:
            report["lag"] = _lag(sounds, options)
            for row in report["lag"]:
                most = (1.2, 3) if row["streams"] == 1 else (None, 4)
                for name, value, limit in zip(
                    ("median", "p95"), (row["median"], row["p95"]), most, strict=True
                ):
                    if limit is not None:
                        what = f"lag, {row['streams']} streams, {name}, seconds"
                        bars.append(bar(what, value, limit, is_least=False))
        if "beside" in parts:
            report["beside"] = beside = _beside(sounds, options)
            bars.append(bar("files beside 4 streams, over what these leave", beside["of_rest"], 0.9))
        if "peers" in parts:
            report["peers"] = _peers(sounds, options)
    report["bars"] = bars
    rows = [(one["name"], f"{one['value']:.3g}", one["bar"], "yes" if one["met"] else "no") for one in bars]
    print(markdown(("what", "value", "bar", "met"), rows), file=sys.stderr)
    publish(report, options.out)
    return 0 if all(one["met"] for one in bars) else 1


def _sounds(folder: Path, options: argparse.Namespace) -> list[Sound]:
    sounds = []
    for number, plan in enumerate(_PLANS[: options.sounds]):
        path, text = speak(folder, number, plan)
        sounds.append(Sound(path, read_sound(path.read_bytes(), 600), text))
    if options.recording is not None:
        text = options.recording.with_suffix(".txt").read_text(encoding="utf-8")
        sounds.append(Sound(options.recording, read_sound(options.recording.read_bytes(), 600), text))
    return sounds


def _wrong(texts: Sequence[str], sounds: Sequence[Sound]) -> float:
    """Returns the percentage of wrong words, in any spelling."""
    pairs = [
        (as_spoken(words(sound.text)), as_spoken(words(text)))
        for sound, text in zip(sounds, texts, strict=True)
    ]
    return 100 * sum(Levenshtein.distance(*pair) for pair in pairs) / sum(len(spoken) for spoken, _ in pairs)


def _quality(sounds: Sequence[Sound], options: argparse.Namespace) -> dict[str, Any]:
    live = asyncio.run(_simulated(sounds, options))
    result = {
        "live": _wrong([text for text, _, _ in live], sounds),
        "revoked": sum(number for _, number, _ in live),
    }
    lags = [lag for _, _, its in live for lag in its]
    result |= {"sound_lag_median": statistics.median(lags), "sound_lag_p95": float(np.quantile(lags, 0.95))}
    with load(options.bundle, precision=options.precision) as model:
        for name, way in _WHOLE.items():
            answers = model.generate((sound.path.read_bytes() for sound in sounds), **way)
            result[name] = _wrong([answer.hypotheses[0].text for answer in answers], sounds)
    print(result, file=sys.stderr)
    return result


async def _simulated(
    sounds: Sequence[Sound], options: argparse.Namespace
) -> list[tuple[str, int, list[float]]]:
    """Returns of each sound the text, the number of stable words that it lacks, and their lags in sound."""
    config = ServerConfig(runner=RunnerConfig(precision=options.precision), log_level="warning")
    model = load_model(options.bundle, config, "live")
    await model.engine.start()
    try:
        return [await _simulated_one(sound, model) for sound in sounds]
    finally:
        await model.engine.stop()


async def _simulated_one(sound: Sound, model: ServedModel) -> tuple[str, int, list[float]]:
    stable, lags = list[str](), list[float]()

    async def see(response: pb.TranscribeResponse) -> None:
        if response.WhichOneof("event") == "text":
            stable.extend(word.text for word in response.text.stable)
            lags.extend(response.received_seconds - word.end_seconds for word in response.text.stable)

    call = Call(request_id="live", caller=Caller(""))
    start = pb.TranscribeStart(encoding=pb.SOUND_ENCODING_PCM_S16)
    stream = LiveStream(
        start, model, call, LiveStreams(1, ServerConfig.live_interval_seconds), Statistics(), see
    )

    async def commands() -> AsyncIterator[bytes]:
        for piece in _pieces(sound):
            yield piece
            await stream.settled()

    whole = (await stream.run(commands())).hypotheses[0].text
    said, kept = words(" ".join("".join(stable).split())), words(whole)
    revoked = sum(1 for edit in Levenshtein.editops(said, kept) if edit.tag != "insert")
    return whole, revoked, lags


def _pieces(sound: Sound) -> list[bytes]:
    content, size = sound.content, 2 * round(_CHUNK_SECONDS * SAMPLE_RATE)
    return [content[first : first + size] for first in range(0, len(content), size)]


def _lag(sounds: Sequence[Sound], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for number in map(int, options.streams.split(",")):
        with serving(options.bundle, ["--precision", options.precision, "--provider", "cpu"]) as server:
            before = server.cpu_seconds()
            began = time.monotonic()
            lags, texts, heard = asyncio.run(_play(sounds, number, server.address))
            used = server.cpu_seconds() - before
        heard_seconds = sum(sound.seconds for sound in heard)
        rows.append(
            {
                "streams": number,
                "median": statistics.median(lags),
                "p95": float(np.quantile(lags, 0.95)),
                "wrong_percent": _wrong(texts, heard),
                "processor_seconds_per_second": used / heard_seconds,
                "seconds": time.monotonic() - began,
            }
        )
        print(rows[-1], file=sys.stderr)
    return rows


async def _play(
    sounds: Sequence[Sound], number: int, address: str
) -> tuple[list[float], list[str], list[Sound]]:
    """Plays sounds at their pace, `number` at once; returns the lags of words, the texts, and the sounds."""
    lags, texts = list[float](), list[str]()
    heard = [sounds[place % len(sounds)] for place in range(max(number, 2))]
    async with aio.insecure_channel(address) as channel:
        stub = Seq2SeqStub(channel)

        async def play(sound: Sound, delay: float) -> str:
            await asyncio.sleep(delay)
            began = time.monotonic()

            async def messages() -> AsyncIterator[pb.TranscribeRequest]:
                start = pb.TranscribeStart(encoding=pb.SOUND_ENCODING_PCM_S16)
                yield pb.TranscribeRequest(start=start)
                for place, piece in enumerate(_pieces(sound), start=1):
                    await asyncio.sleep(began + place * _CHUNK_SECONDS - time.monotonic())
                    yield pb.TranscribeRequest(sound=piece)

            async for response in stub.Transcribe(messages()):
                if response.WhichOneof("event") == "text":
                    now = time.monotonic() - began
                    lags.extend(now - word.end_seconds for word in response.text.stable)
                elif response.WhichOneof("event") == "result":
                    return str(response.result.hypotheses[0].text)
            raise AssertionError

        if number == 1:
            for sound in heard:
                texts.append(await play(sound, 0))
        else:
            texts += await asyncio.gather(*(play(sound, place * 0.37) for place, sound in enumerate(heard)))
    return lags, texts, heard


def _beside(sounds: Sequence[Sound], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the tokens/s of files alone and beside streams, and the processors that the streams take."""
    with serving(options.bundle, ["--precision", options.precision, "--provider", "cpu"]) as server:
        before, began = server.cpu_seconds(), time.monotonic()
        lags, _, heard = asyncio.run(_play(sounds, _STREAMS_BESIDE, server.address))
        num_taken = (server.cpu_seconds() - before) / (time.monotonic() - began)
        play_seconds = max(sound.seconds for sound in heard)

        async def both() -> tuple[tuple[list[float], list[str], list[Sound]], float]:
            files = asyncio.create_task(_transcribe(sounds, play_seconds, server.address))
            return await _play(sounds, _STREAMS_BESIDE, server.address), await files

        alone = asyncio.run(_transcribe(sounds, play_seconds, server.address))
        (lags_beside, _, _), beside = asyncio.run(both())
    share = num_taken / len(os.sched_getaffinity(0))
    result = {
        "files_tokens_per_second": alone,
        "beside_streams": beside,
        "share_of_streams": share,
        "of_rest": beside / alone / (1 - share),
        "lag_median": statistics.median(lags),
        "lag_p95": float(np.quantile(lags, 0.95)),
        "lag_median_beside_files": statistics.median(lags_beside),
        "lag_p95_beside_files": float(np.quantile(lags_beside, 0.95)),
    }
    print(result, file=sys.stderr)
    return result


async def _transcribe(sounds: Sequence[Sound], seconds: float, address: str) -> float:
    """Transcribes files, some at once, for some seconds; returns the tokens per second."""
    way = pb.GenerateOptions(long_source=pb.LONG_SOURCE_SPLIT, timestamps=True, voice_activity=True)
    number, end = 0.0, time.monotonic() + seconds
    async with aio.insecure_channel(address) as channel:
        stub = Seq2SeqStub(channel)

        async def transcribe(first: int) -> None:
            nonlocal number
            for place in itertools.count(first, _FILES_BESIDE):
                content = sounds[place % len(sounds)].path.read_bytes()
                request = pb.GenerateRequest(sources=[pb.Source(file=content)], options=way)
                began = time.monotonic()
                response = await stub.Generate(request)
                now = time.monotonic()
                number += response.usage.target_tokens * min((end - began) / (now - began), 1)
                if now > end:
                    return

        await asyncio.gather(*map(transcribe, range(_FILES_BESIDE)))
    return number / seconds


def _peers(sounds: Sequence[Sound], options: argparse.Namespace) -> dict[str, Any]:
    """Returns wrong words, and processor seconds a second of sound."""
    seconds = sum(sound.seconds for sound in sounds)
    samples = [sound.samples for sound in sounds]
    result: dict[str, Any] = {}
    ways: dict[str, Callable[[], tuple[list[str], float]]] = {
        "here": lambda: _here(sounds, options),
        "whisper-streaming": lambda: whisper_streaming(samples, options.weights, options.precision),
    }
    if options.whisper_live is not None:
        ways["whisper-live"] = lambda: whisper_live(samples, options.weights, options.whisper_live)
    for name, texts_of in ways.items():
        texts, used = texts_of()
        result[name] = {
            "wrong_percent": _wrong(texts, sounds),
            "processor_seconds_per_second": used / seconds,
        }
        print(name, result[name], file=sys.stderr)
    return result


def _here(sounds: Sequence[Sound], options: argparse.Namespace) -> tuple[list[str], float]:
    async def texts() -> tuple[list[str], float]:
        config = ServerConfig(runner=RunnerConfig(precision=options.precision), log_level="warning")
        model = load_model(options.bundle, config, "live")
        await model.engine.start()
        began = time.process_time()
        found = [(await _simulated_one(sound, model))[0] for sound in sounds]
        used = time.process_time() - began
        await model.engine.stop()
        return found, used

    return asyncio.run(texts())


if __name__ == "__main__":
    sys.exit(main())
