"""Transcribes a sound of any length, which is sent while it is read, and writes its segments as they come.

The unfinished output has a folder FILE.parts beside it, as that of translated lines: a plan, and the segments
so far. The output is written from them, so that a command that was killed leaves nothing that cannot be
continued.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import BinaryIO, TextIO

from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.json_format import ParseError as JsonError

from seq2seq_serve.client.aio import AsyncClient
from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.files.lines import STANDARD
from seq2seq_serve.client.files.plan import (
    PLAN_FILE,
    JobError,
    Plan,
    check_plan,
    locked,
    read_plan,
    state_of,
    write_plan,
)
from seq2seq_serve.client.live import LiveResult, LiveSegment
from seq2seq_serve.client.output import to_json
from seq2seq_serve.client.progress import SoundProgress
from seq2seq_serve.client.speech.sounds import file_sound
from seq2seq_serve.client.speech.transcript import Transcript
from seq2seq_serve.client.translate import parts_folder
from seq2seq_serve.protos.dicts import message_dict
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, GenerateResponse, Segment, TurnDetection

_SEGMENTS_FILE = "segments.jsonl"

Connect = Callable[[], AsyncClient]


def transcribe_parts(
    connect: Connect,
    model: str,
    options: argparse.Namespace,
    generate_options: GenerateOptions,
    stream: BinaryIO,
    begun: bytes = b"",
) -> None:
    """Transcribes a file or standard input, and writes the transcript to `--output` or standard output.

    Args:
        connect: Opens a connection to the server, on an event loop.
        model: The name of the model.
        options: The command's flags.
        generate_options: Of the segments.
        stream: The open file.
        begun: What was read of it.

    Raises:
        ClientError: The server refuses the sound, or the connection breaks.
        OSError: The sound cannot be read, or the output cannot be written.
        JobError: The output to continue belongs to another command or input.
    """
    output: Path = options.output
    generate_options.ClearField("voice_activity")  # is always on, for the parts
    with ExitStack() as stack:
        parts: _Parts | None = None
        file: TextIO = sys.stdout
        if output != STANDARD:
            output = output.resolve()
            if options.file.is_file() and (output.is_file() or not output.exists()):
                if options.resume and output.exists() and not parts_folder(output).exists():
                    sys.stderr.write(f"{output} is complete, and nothing was transcribed\n")
                    return
                stack.enter_context(locked(parts_folder(output)))
                parts = _Parts(output, _plan(model, options, generate_options), overwrite=options.overwrite)
                stack.callback(parts.close)
            file = stack.enter_context(output.open("w", encoding="utf-8", newline=""))
        run = _Run(file, parts, options, generate_options)
        try:
            asyncio.run(run.transcribe(connect, model, stream, begun))
        except (ClientError, OSError, KeyboardInterrupt, asyncio.CancelledError) as error:
            if parts is not None and parts.segments:
                error.add_note("continue with the same command and --resume")
            elif parts is not None:
                if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
                    error.add_note("no segment is complete, so nothing is kept")
                parts.remove()
                output.unlink()
            raise
        if parts is not None:
            parts.remove()


def _plan(model: str, options: argparse.Namespace, generate_options: GenerateOptions) -> Plan:
    """Returns all that the transcript depends on."""
    path = options.file.absolute()
    given = MessageToDict(generate_options, preserving_proto_field_name=True)
    given.pop("priority", None)  # it does not change any text
    settings = {
        "model": model,
        "options": given,
        "file_type": options.file_type,
        "turn_detection": not options.no_turn_detection,
        "format": options.format or ("json" if options.json else "text"),
    }
    return Plan(settings, {str(path): state_of(path)})


class _Run:
    """One transcription. Owned by `transcribe_parts`.

    Args:
        file: The output.
        parts: What was written before, and what is written now; None keeps nothing.
        options: The command's flags.
        generate_options: Of the segments.
    """

    def __init__(
        self,
        file: TextIO,
        parts: _Parts | None,
        options: argparse.Namespace,
        generate_options: GenerateOptions,
    ) -> None:
        self._file, self._parts, self._options, self._generate = file, parts, options, generate_options
        self._transcript = Transcript(options.format, generate_options)
        known = parts.segments if parts is not None else []
        self._all = list(known) if options.json else []
        self._known = Counter(map(_key, known))
        self._begin_seconds = known[-1].begin_seconds if known else 0.0
        self._write(self._transcript.beginning + "".join(map(self._transcript.text, known)))

    async def transcribe(self, connect: Connect, model: str, stream: BinaryIO, begun: bytes) -> None:
        """Sends the sound, and writes its segments."""
        sound = file_sound(self._options.file, stream, self._options.form, begun)
        is_shown = sys.stderr.isatty() and not self._file.isatty()
        progress = SoundProgress(
            sys.stderr, is_shown=is_shown, total_seconds=sound.seconds, total_bytes=sound.num_bytes
        )
        answer, num_sent = GenerateResponse(), 0

        async def counted() -> AsyncGenerator[bytes]:
            nonlocal num_sent
            async for chunk in sound.chunks:
                num_sent += len(chunk)
                yield chunk

        async with connect() as client:
            events = client.transcribe_live(
                counted(),
                model=model,
                options=self._generate,
                encoding=sound.form.encoding,
                sample_rate=sound.form.sample_rate,
                num_channels=sound.form.num_channels,
                turn_detection=TurnDetection(off=True) if self._options.no_turn_detection else None,
                segments_only=True,
                begin_seconds=self._begin_seconds,
            )
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, LiveSegment):
                        self._take(event.segment)
                    elif isinstance(event, LiveResult):
                        answer = event.answer
                    progress.show(event.received_seconds, num_sent)
        progress.close()
        if self._options.json:
            self._write_json(answer)

    def _take(self, segment: Segment) -> None:
        if self._known[_key(segment)]:
            self._known[_key(segment)] -= 1
            return
        if segment.begin_seconds < self._begin_seconds:  # of another server, whose times differ a little
            return
        if self._parts is not None:
            self._parts.add(segment)
        if self._options.json:
            self._all.append(segment)
        else:
            self._write(self._transcript.text(segment))

    def _write_json(self, answer: GenerateResponse) -> None:
        [whole] = answer.hypotheses
        del whole.segments[:], whole.token_ids[:]
        whole.segments.extend(self._all)
        whole.text = " ".join(filter(None, (segment.text.strip() for segment in self._all)))
        for segment in whole.segments:
            whole.token_ids.extend(segment.token_ids)
            if not self._generate.word_timestamps:
                del segment.words[:]
        self._file.write(to_json(message_dict(answer)) + "\n")
        self._file.flush()

    def _write(self, text: str) -> None:
        if not self._options.json:
            self._file.write(text)
            self._file.flush()


class _Parts:
    """The folder of an unfinished output. Owned by `transcribe_parts`.

    Args:
        output: The output.
        plan: What the output depends on.
        overwrite: Whether to begin anew.

    Attributes:
        segments: Those of an earlier command, then those of this one.

    Raises:
        JobError: The folder belongs to another command or input.
    """

    def __init__(self, output: Path, plan: Plan, *, overwrite: bool) -> None:
        self._folder = parts_folder(output)
        self._path = self._folder / _SEGMENTS_FILE
        before = read_plan(self._folder)
        others = {path.name for path in self._folder.iterdir()} if self._folder.exists() else set()
        if others - {PLAN_FILE, _SEGMENTS_FILE} or (others and before is None):
            raise JobError(
                f"{self._folder} exists, and this command did not create it: give another --output"
            )
        if before is not None and not overwrite:
            check_plan(self._folder, before, plan, "replace it with --overwrite")
        else:
            self._path.unlink(missing_ok=True)
            write_plan(self._folder, plan)
        self.segments = [*self._read()]
        self._file = self._path.open("ab")

    def _read(self) -> Iterator[Segment]:
        """Yields the segments that were written whole, and removes the rest of one that was not."""
        if not self._path.exists():
            return
        num_whole = 0
        with self._path.open("r+b") as file:
            for line in file:
                try:
                    segment = ParseDict(json.loads(line), Segment())
                except (ValueError, JsonError):
                    break
                if not line.endswith(b"\n"):
                    break
                num_whole += len(line)
                yield segment
            file.truncate(num_whole)

    def add(self, segment: Segment) -> None:
        """Writes a segment to the disk."""
        self.segments.append(segment)
        content = MessageToDict(segment, preserving_proto_field_name=True)
        self._file.write(json.dumps(content).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder)


def _key(segment: Segment) -> tuple[float, float, str]:
    return segment.begin_seconds, segment.end_seconds, segment.text
