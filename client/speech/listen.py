"""Runs `transcribe --live`: writes what is said while it is said.

On a terminal, the text of the present segment grows in place. Elsewhere each segment is written when it is
complete. Ctrl-C ends the sound; what was said before is still written.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress

from seq2seq_serve.client.aio import AsyncClient
from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.live import LiveEvent, LiveResult, LiveSegment, LiveText
from seq2seq_serve.client.output import event_dict, in_flags, to_json
from seq2seq_serve.client.speech.screen import Screen
from seq2seq_serve.client.speech.sounds import (
    heard_sound,
    opened,
    played_sound,
    streamed_sound,
    until,
)
from seq2seq_serve.client.speech.transcript import Transcript
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    LONG_SOURCE_SPLIT,
    GenerateOptions,
    Model,
    Segment,
    TurnDetection,
)

_TRANSLATION_SECONDS = 10.0  # after which a segment is written without one

Connect = Callable[[], AsyncClient]
Translate = Callable[[str], Coroutine[None, None, str | None]]


async def listen(
    connect: Connect,
    model: str,
    then: Model | None,
    options: argparse.Namespace,
    generate_options: GenerateOptions,
) -> None:
    """Transcribes a microphone, standard input or a file until it ends, or Ctrl-C.

    Args:
        connect: Opens a connection to the server, on an event loop.
        model: The name of the model that reads sounds.
        then: The model that translates segments; None for none.
        options: The command's flags.
        generate_options: Of the segments.

    Raises:
        ClientError: The server refuses the sound, or the connection breaks.
        OSError: The sound cannot be read.
    """
    generate_options.ClearField("voice_activity")  # is always on, for turns
    then_options = GenerateOptions(source_language=options.then_source_language)
    if then is not None:
        then_options.target_language = generate_options.target_language
        generate_options.ClearField("target_language")
        if not then.splits_sentences:  # which is its own way for long texts
            then_options.long_source = LONG_SOURCE_SPLIT
    async with AsyncExitStack() as stack:
        if options.file is None:
            sound = heard_sound()
            sys.stderr.write("speak; Ctrl-C ends it\n")
        else:
            stream = stack.enter_context(opened(options.file))
            if options.file.is_file():
                sound = played_sound(options.file, stream, options.form)
            else:
                sound = await streamed_sound(stream, options.form)
        client = await stack.enter_async_context(connect())

        async def translate(text: str) -> str | None:
            assert then is not None
            try:
                return await client.translate(
                    text,
                    model=then.name,
                    options=then_options,
                    timeout_seconds=_TRANSLATION_SECONDS,
                )
            except ClientError as error:
                problem = in_flags(error)
                if error.code == "DEADLINE_EXCEEDED":  # of no flag
                    problem = f"no translation came within {_TRANSLATION_SECONDS:g} seconds"
                output.warn(f"warning: not translated: {problem}\n")
                return None

        output = Output(
            Transcript(options.format, generate_options),
            translate if then is not None else None,
            as_json=options.json,
            is_drawn=sys.stdout.isatty() and not options.json,
        )
        stopping = asyncio.Event()
        with _interrupting(stopping):
            events = client.transcribe_live(
                until(stopping, sound.chunks),
                model=model,
                options=generate_options,
                encoding=sound.form.encoding,
                sample_rate=sound.form.sample_rate,
                num_channels=sound.form.num_channels,
                turn_detection=TurnDetection(off=True) if options.no_turn_detection else None,
            )
            try:
                async with aclosing(events):
                    async for event in events:
                        output.take(event)
            finally:
                await output.finish()


@contextmanager
def _interrupting(stopping: asyncio.Event) -> Iterator[None]:
    """Sets `stopping` at the first Ctrl-C; a second one ends the command as usual."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopping.set()
        loop.remove_signal_handler(signal.SIGINT)

    # Not on Windows, and not on a thread, where Ctrl-C ends the command at once.
    with suppress(NotImplementedError, RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)


class Output:
    """Writes events to standard output: growing text on a terminal, and segments in order.

    Translations run beside each other, and beside the transcription, which does not wait for them. A segment
    is written when it and all before it have theirs, which takes at most the deadline of one.

    Args:
        transcript: Forms segments.
        translate: Translates a text; None if there is no second model.
        as_json: Whether each event is a line of JSON.
        is_drawn: Whether standard output is a terminal where the present text grows.
    """

    def __init__(
        self, transcript: Transcript, translate: Translate | None, *, as_json: bool, is_drawn: bool
    ) -> None:
        self._transcript, self._translate = transcript, translate
        self._as_json = as_json
        self._screen = Screen(sys.stdout) if is_drawn else None
        self._waiting = deque[tuple[Segment, asyncio.Task[str | None]]]()
        self._writer: asyncio.Task[None] | None = None
        self._stable: list[str] = []  # words of the present segment
        self._unstable = ""
        self._has_heard = False
        if not as_json:
            self._write(transcript.beginning)

    def take(self, event: LiveEvent) -> None:
        """Shows an event; does not wait."""
        if self._as_json:
            self._write(to_json(event_dict(event)) + "\n")
        if isinstance(event, LiveText):
            self._stable += [word.text for word in event.stable]
            self._unstable = event.unstable
        if isinstance(event, LiveSegment):
            self._has_heard = True
            # The words after a segment that was cut are the beginning of the next one.
            del self._stable[: len(event.segment.words)]
            self._finish_segment(event.segment)
        if isinstance(event, LiveResult) and not self._has_heard:
            self.warn(f"warning: nobody speaks in {event.answer.usage.source_seconds:.1f} seconds of sound\n")
        self._draw()

    async def finish(self) -> None:
        """Writes the segments whose translations are not complete, and clears the rest."""
        self._stable, self._unstable = [], ""
        if self._writer is not None:
            await self._writer
        self._draw()

    def warn(self, text: str) -> None:
        """Writes a line to standard error, and not into the drawn text."""
        if self._screen is not None:
            self._screen.write("")
        sys.stderr.write(text)
        sys.stderr.flush()
        self._draw()

    def _finish_segment(self, segment: Segment) -> None:
        if self._translate is None:
            if not self._as_json:
                self._write(self._transcript.text(segment))
            return
        if not segment.text.strip():
            return
        self._waiting.append((segment, asyncio.create_task(self._translate(segment.text.strip()))))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_translations())

    async def _write_translations(self) -> None:
        while self._waiting:
            segment, task = self._waiting[0]
            translation = await task
            self._waiting.popleft()
            if self._as_json:
                if translation is not None:
                    times = {"begin_seconds": segment.begin_seconds, "end_seconds": segment.end_seconds}
                    self._write(to_json({"translation": times | {"text": translation}}) + "\n")
            elif self._screen is not None and translation is not None and self._transcript.is_plain:
                self._write(f"{self._transcript.text(segment)}  {translation.strip()}\n")
            else:
                self._write(self._transcript.text(segment, translation))
            self._draw()

    def _write(self, text: str) -> None:
        if self._screen is not None:
            self._screen.write(text)
        elif text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _draw(self) -> None:
        if self._screen is not None:
            certain = [segment.text.strip() for segment, _ in self._waiting]
            self._screen.draw(certain, "".join(self._stable), self._unstable)
