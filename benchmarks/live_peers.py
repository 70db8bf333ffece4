"""Live transcription by other packages, for `benchmarks.live`: their texts, and their processor time."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from benchmarks.serving import cpu_seconds, free_ports
from seq2seq_serve.bundle.audio import SAMPLE_RATE, Samples

_CHUNK_SECONDS = 0.25
_LAST_SECONDS, _QUIET_SECONDS = 2.0, 10.0  # silence after a sound, and no message after the last one
_START_SECONDS = 120.0
_SERVER = """
from whisper_live.server import TranscriptionServer
TranscriptionServer().run("127.0.0.1", {port}, "faster_whisper", {weights!r}, single_model=True)
"""


def whisper_streaming(sounds: Sequence[Samples], weights: Path, precision: str) -> tuple[list[str], float]:
    """Its processor gets a second at a time, and has a buffer of 15 seconds, as in its own example."""
    from whisper_streaming import ASRProcessor, AudioReceiver, Backend, OutputSender, TimeTrimming
    from whisper_streaming.backend import (
        FasterWhisperFeatureExtractorConfig,
        FasterWhisperModelConfig,
        FasterWhisperTranscribeConfig,
    )

    class Pieces(AudioReceiver):  # type: ignore[misc]
        """Gives the next second when the last one was taken."""

        def __init__(self, samples: Samples) -> None:
            super().__init__()
            self._rest = samples

        def _do_receive(self) -> Samples | None:
            while not self.queue.empty():
                time.sleep(0.001)
            piece, self._rest = self._rest[:SAMPLE_RATE], self._rest[SAMPLE_RATE:]
            return piece if len(piece) else None

        def _do_close(self) -> None:
            """Nothing is open."""

    class Words(OutputSender):  # type: ignore[misc]
        """Collects what is certain."""

        def _do_output(self, data: Any) -> None:
            """Nothing is shown."""

        def _do_close(self) -> None:
            """Nothing is open."""

    texts, used = list[str](), 0.0
    for sound in sounds:
        sender = Words()
        sender.start = lambda: None  # its queue is read at the end
        processor = ASRProcessor(
            ASRProcessor.ProcessorConfig(
                sampling_rate=SAMPLE_RATE,
                prompt_size=200,
                audio_receiver_timeout=2,
                audio_trimming=TimeTrimming(seconds=15),
                language="en",
            ),
            Pieces(sound),
            sender,
            Backend.FASTER_WHISPER,
            FasterWhisperModelConfig(
                model_size_or_path=str(weights),
                device="cpu",
                compute_type={"fp32": "float32"}.get(precision, precision),
            ),
            FasterWhisperTranscribeConfig(),
            FasterWhisperFeatureExtractorConfig(),
        )
        began = time.process_time()
        processor.run()
        used += time.process_time() - began
        texts.append("".join(sender.queue.get().word for _ in range(sender.queue.qsize())))
    return texts, used


def whisper_live(sounds: Sequence[Samples], weights: Path, python: Path) -> tuple[list[str], float]:
    """Returns its texts, and the processor seconds of its server.

    It decodes a sound again as soon as it has decoded it, so the sounds come at their pace, one after the
    other. On a processor its precision is int8.

    Args:
        sounds: At 16 kHz.
        weights: Of the model, for faster-whisper.
        python: Of an environment that has it: its dependencies do not fit to those of this project.
    """
    [port] = free_ports(1)
    code = _SERVER.format(port=port, weights=str(weights))
    with subprocess.Popen([python, "-c", code]) as server:
        try:
            with _connected(port):  # loads the model
                pass
            before = cpu_seconds(server.pid)
            texts = [_said(sound, port) for sound in sounds]
            used = cpu_seconds(server.pid) - before
        finally:
            server.send_signal(signal.SIGKILL)
    return texts, used


@contextmanager
def _connected(port: int) -> Iterator[ClientConnection]:
    """Yields a connection to a server that waits for sound."""
    latest = time.monotonic() + _START_SECONDS
    while True:
        try:
            connection = connect(f"ws://127.0.0.1:{port}")
            break
        except (OSError, WebSocketException):
            if time.monotonic() > latest:
                raise
            time.sleep(0.5)
    with connection:
        options = {
            "uid": "benchmark",
            "language": "en",
            "task": "transcribe",
            "model": "small",
            "use_vad": True,
            "send_last_n_segments": 10**6,
        }
        connection.send(json.dumps(options))
        while json.loads(connection.recv()).get("message") != "SERVER_READY":
            pass
        yield connection
        connection.send(b"END_OF_AUDIO")


def _said(sound: Samples, port: int) -> str:
    size = round(_CHUNK_SECONDS * SAMPLE_RATE)
    whole = np.pad(sound, (0, round(_LAST_SECONDS * SAMPLE_RATE))).astype(np.float32)
    segments: list[dict[str, Any]] = []
    with _connected(port) as connection:
        began = time.monotonic()
        for place, first in enumerate(range(0, len(whole), size), start=1):
            connection.send(whole[first : first + size].tobytes())
            with suppress(TimeoutError):
                while True:
                    rest = began + place * _CHUNK_SECONDS - time.monotonic()
                    segments = json.loads(connection.recv(max(rest, 0))).get("segments", segments)
        with suppress(TimeoutError):
            while True:
                segments = json.loads(connection.recv(_QUIET_SECONDS)).get("segments", segments)
    return " ".join(segment["text"] for segment in segments)
