"""Reads the log of the CUDA stub: `python -m tests.cuda_stub.log FILE` prints a summary of each section.

A line is `tTHREAD EVENT s=STREAM …`; a line `## NAME` begins a section. Work with `capture=ID` was put into
that capture instead of being run.

| event | |
|---|---|
| `launch`, `library` | a kernel with its grid and block; a call of cuBLAS or cuDNN that computes |
| `copy`, `copy_sync`, `memset`, `memset_sync` | `_sync` is on the default stream, and the host waits for it |
| `sync_stream`, `sync_device`, `sync_event` | the host waits |
| `record`, `wait` | a stream records an event, or waits for one |
| `malloc`, `free`, `malloc_pinned`, `free_pinned` | of device memory, and of pinned host memory |
| `stream_create`, `stream_destroy`, `handle_create` | streams; handles of cuBLAS and cuDNN |
| `begin_capture`, `end_capture`, `graph_instantiate`, `graph_launch` | with the number of nodes |
| `ERROR code in call` | what CUDA would refuse: 900, 905, 906, 907 break a capture, and 901 is what follows |
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_LINE = re.compile(r"t(?P<thread>\d+) (?P<name>\w+) ?(?P<details>.*)")
_FIELD = re.compile(r"\b(s|capture|nodes|bytes)=(\d+)")
_PLACES = re.compile(r"(pageable|pinned|device)->(pageable|pinned|device)")
_NAMESPACE = re.compile(r"\(anonymous namespace\)::|\w+::")


@dataclass(frozen=True)
class Event:
    """A line of the log.

    Attributes:
        thread: Number of the thread, from 1.
        details: The rest of the line after the name.
    """

    thread: int
    name: str
    details: str

    @cached_property
    def fields(self) -> dict[str, int]:
        """The numbers of the line by name: `s` (stream), `capture`, `nodes`, `bytes`."""
        return {name: int(number) for name, number in _FIELD.findall(self.details)}

    @property
    def kernel(self) -> str:
        """Name of the kernel or library function, without namespaces and arguments."""
        words = re.sub(r"\b(s|capture|grid|block)=\S+ ", "", self.details)
        if self.name == "library":
            return words.split()[0]
        return re.split(r"[<(]", _NAMESPACE.sub("", words))[0].split()[-1]


@dataclass(frozen=True)
class Copy:
    """A kind of copy.

    Attributes:
        direction: "H2D" (host to device), "D2H", "D2D", or "H2H".
        is_synchronous: Whether the host waits for it.
    """

    direction: str
    is_synchronous: bool = False

    def __str__(self) -> str:
        return self.direction + (" synchronous" if self.is_synchronous else "")


@dataclass(frozen=True)
class Section:
    """The events of a process between two marks.

    Attributes:
        name: The mark's; empty before the first mark.
    """

    name: str
    events: tuple[Event, ...]

    @property
    def launches(self) -> Counter[str]:
        """Kernels and library calls by name, those inside captures left out."""
        return Counter(event.kernel for event in self._launches() if "capture" not in event.fields)

    @property
    def captured_launches(self) -> Counter[str]:
        """Kernels and library calls by name that were put into captures."""
        return Counter(event.kernel for event in self._launches() if "capture" in event.fields)

    @property
    def graph_launches(self) -> list[int]:
        """Number of nodes of each graph that was launched, in order."""
        return [event.fields["nodes"] for event in self.named("graph_launch")]

    @property
    def captures(self) -> list[int]:
        """Number of nodes of each capture that succeeded, in order."""
        return [event.fields["nodes"] for event in self.named("graph_instantiate")]

    @property
    def copies(self) -> Counter[Copy]:
        """Copies by kind, those inside captures left out."""
        found: Counter[Copy] = Counter()
        for event in self.named("copy", "copy_sync"):
            places = _PLACES.search(event.details)
            if places and "capture" not in event.fields:
                source, target = ("D" if place == "device" else "H" for place in places.groups())
                found[Copy(f"{source}2{target}", event.name == "copy_sync")] += 1
        return found

    @property
    def synchronisations(self) -> Counter[str]:
        """Waits of the host, besides those of synchronous copies, by what it waits for."""
        events = self.named("sync_stream", "sync_device", "sync_event")
        return Counter(event.name.removeprefix("sync_") for event in events)

    @property
    def num_allocations(self) -> int:
        """Allocations of device memory and of pinned memory."""
        return len(self.named("malloc", "malloc_pinned"))

    @property
    def num_streams_created(self) -> int:
        """Streams created."""
        return len(self.named("stream_create"))

    @property
    def num_handles_created(self) -> int:
        """Handles of cuBLAS and cuDNN created."""
        return len(self.named("handle_create"))

    @property
    def errors(self) -> list[str]:
        """What CUDA would refuse, and calls of functions that the stub lacks."""
        return [event.details for event in self.named("ERROR")]

    def named(self, *names: str) -> list[Event]:
        """The events of these names."""
        return [event for event in self.events if event.name in names]

    def _launches(self) -> list[Event]:
        return self.named("launch", "library")

    def __str__(self) -> str:
        counts: dict[str, Counter[Any]] = {
            "errors": Counter(self.errors),
            "graph launches": Counter(f"{nodes} nodes" for nodes in self.graph_launches),
            "captures": Counter(f"{nodes} nodes" for nodes in self.captures),
            "copies": self.copies,
            "synchronisations": self.synchronisations,
            "created": Counter(
                event.name
                for event in self.named("malloc", "malloc_pinned", "stream_create", "handle_create")
            ),
            "launches": self.launches,
            "captured launches": self.captured_launches,
        }
        lines = [
            f"  {kind}: {count.total()} (" + ", ".join(f"{n} {name}" for name, n in count.most_common()) + ")"
            for kind, count in counts.items()
            if count
        ]
        return "\n".join([f"## {self.name}", *lines])


@dataclass(frozen=True)
class Log:
    """All events of a process on the stub.

    Attributes:
        sections: In order; the first holds what came before the first mark.
    """

    sections: tuple[Section, ...]

    def __getitem__(self, name: str) -> Section:
        """The section of a name that occurs once."""
        [section] = [section for section in self.sections if section.name == name]
        return section

    @property
    def whole(self) -> Section:
        """All sections as one."""
        return Section("", tuple(event for section in self.sections for event in section.events))


def read_log(text: str) -> Log:
    """Read a log.

    Raises:
        ValueError: A line is none of the stub's.
    """
    sections: list[tuple[str, list[Event]]] = [("", [])]
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if line.startswith("## "):
            sections.append((line.removeprefix("## "), []))
        elif match:
            sections[-1][1].append(Event(int(match["thread"]), match["name"], match["details"]))
        else:
            raise ValueError(f"{line!r} is not a line of the CUDA stub's log")
    return Log(tuple(Section(name, tuple(events)) for name, events in sections))


def main(arguments: list[str] | None = None) -> int:
    """Print a log's sections that are not empty; 0 no call failed, 1 one did."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_stub.log",
        description="Summarise a log of the CUDA stub, section by section.",
        epilog="example:\n  python -m tests.cuda_stub.log /tmp/stub.log",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="written where CUDA_STUB_LOG points to")
    try:
        text = parser.parse_args(arguments).file.read_text(errors="replace")
    except OSError as error:
        parser.error(str(error))
    log = read_log(text)
    for section in log.sections:
        if section.events:
            print(section)
    return int(bool(log.whole.errors))


if __name__ == "__main__":
    sys.exit(main())
