"""A runner without graphs: its next token is a pure function of what a row holds.

It keeps memory and cache by row as the real one does, so that a row that was moved wrongly, or not at all,
decodes something else.
"""

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from seq2seq_serve.bundle.adapters import Weights
from seq2seq_serve.server.engine.drafts import Drafter
from seq2seq_serve.server.engine.ngrams import Follower
from seq2seq_serve.server.engine.plan import Branches, Candidates, Move, Selected, Wanted
from seq2seq_serve.server.engine.request import Array, Request
from seq2seq_serve.server.engine.state import Sequence
from seq2seq_serve.server.telemetry.metrics import Metrics
from seq2seq_serve.server.telemetry.record import Caller, CallRecord, Work

START_ID, EOS_ID, VOCAB_SIZE = 1, 2, 97
SOURCE = "source_ids"


def sample_value(metrics: Metrics, name: str, labels: Mapping[str, str]) -> float | None:
    """The sum of all values with these labels, whatever others they have; None without any."""
    found = [
        sample.value
        for family in metrics.registry.restricted_registry([name]).collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found) if found else None


def next_token(source: tuple[int, ...], fed: list[int]) -> int:
    """What follows the fed target tokens; the source's first id decides how long a target gets."""
    if len(fed) > source[0] % 11:
        return EOS_ID
    mixed = sum((i + 1) * token for i, token in enumerate((*source, *fed)))
    return 3 + mixed % (VOCAB_SIZE - 3)


def expected_tokens(
    source: tuple[int, ...], max_new_tokens: int, start_ids: tuple[int, ...] = ()
) -> list[int]:
    """The whole target of a source decoded alone, by definition."""
    target: list[int] = []
    while len(target) < max_new_tokens:
        token = next_token(source, [*(start_ids or (START_ID,)), *target])
        if token == EOS_ID:
            break
        target.append(token)
    return target


def make_request(source: tuple[int, ...], **options) -> Request:
    """A request of a source, with defaults for everything else."""
    settings = {"request_id": f"r{source}", "max_new_tokens": 8, "arrival": 0.0} | options
    return Request(sources={SOURCE: np.array(source)}, memory_length=len(source), **settings)


def record_of(**changes) -> CallRecord:
    """The record of a call that succeeded."""
    fields = {
        "request_id": "mine",
        "service": "seq2seq.v1.Seq2Seq",
        "method": "Generate",
        "metadata": (),
        "caller": Caller("shop"),
        "model": "echo",
        "code": "OK",
        "code_number": 0,
        "seconds": 0.1,
        "trace_id": "",
        "work": Work("greedy", source_tokens=3, target_tokens=4),
    }
    return CallRecord(**fields | changes)


def detected_id(source: tuple[int, ...], detected_ids: tuple[int, ...]) -> int:
    """The start token that is detected in a source."""
    return detected_ids[sum(source) % len(detected_ids)]


def ways_to_go_on(source: tuple[int, ...], fed: list[int], index: int | None) -> Branches:
    """All tokens and their log-probabilities, the best first, or as they would be drawn for a sample."""
    chance = random.Random(f"{source} {fed} {index}")
    token_ids = chance.sample(range(EOS_ID, VOCAB_SIZE), VOCAB_SIZE - EOS_ID)
    return Branches(token_ids, sorted((-8 * chance.random() for _ in token_ids), reverse=True))


def selected(
    rows: tuple[Sequence, ...],
    tokens: list[int],
    branches: Mapping[int, Branches],
    attention: Mapping[int, Array] | None = None,
    wanted: Mapping[int, Mapping[int, float]] | None = None,
) -> Selected:
    """The tokens of a step; the branches of beams become candidates."""
    beams = [row for row in branches if rows[row].request.beam is not None and rows[row].num_branches > 1]
    if not beams:
        return Selected(tokens, branches, attention=attention or {})
    width = max(len(branches[row].token_ids) for row in beams)
    shape = (len(beams), width)
    found = [list((wanted or {}).get(row, {}).values()) for row in beams]
    assert wanted or not any(rows[row].progress for row in beams)
    candidates = Candidates(
        {row: place for place, row in enumerate(beams)},
        np.zeros(shape, np.int64),
        np.full(shape, -math.inf),
        Wanted.by(rows[row] for row in beams),
        np.array([score for of_row in found for score in of_row]),
    )
    for place, row in enumerate(beams):
        number = len(branches[row].token_ids)
        candidates.token_ids[place, :number] = branches[row].token_ids
        candidates.log_probabilities[place, :number] = branches[row].log_probabilities
    others = {row: ways for row, ways in branches.items() if row not in beams}
    return Selected(tokens, others, (candidates,), attention=attention or {})


def attended(source: tuple[int, ...], fed: list[int]) -> Array:
    """Attention `(T, S)` of the fed tokens."""
    weights = (np.cumsum(fed)[:, None] + source).astype(np.float32)
    return weights / weights.sum(axis=1, keepdims=True)


class KnowingDrafter(Drafter):
    """Drafts the given targets of requests, with some wrong tokens, and any tokens after their ends.

    Without a clock that goes on during a step, a position costs nothing, so that it always drafts.
    """

    def __init__(self, targets: Mapping[Request, list[tuple[int, ...]]], vocab_size: int, seed: int) -> None:
        super().__init__((EOS_ID,), None)
        self._targets, self._vocab_size, self._chance = targets, vocab_size, random.Random(seed)

    def _follow(self, row: Sequence) -> Follower:
        length, chance = len(row.token_ids), self._chance
        targets = [target for target in self._targets[row.request] if [*target[:length]] == row.token_ids]
        rest = targets[0][length:] if targets else ()
        others = (chance.randrange(3, self._vocab_size) for _ in range(2 + len(rest)))
        ids = [
            token_id if chance.random() < 0.8 else other
            for token_id, other in zip_longest(rest, others, fillvalue=3)
        ]
        return Follower(ids[: chance.randint(0, len(ids))], rate=1.0)


class FakeRunner:
    """Stands in for `server.runner.runner.OnnxRunner`.

    Args:
        num_slots: Rows.
        is_recurrent: Whether it keeps what it was fed as a state instead of a cache, so that prefixes,
            scores and attention go by steps. Its answers are the same.
        shares_memory: Whether it reads the memory of a request in its owner's row.
        fail_encode: Raises on an encode call whose requests include one with this first source id.
        fail_steps: The numbers of the steps, from 0, that raise.
    """

    max_source_length = 64
    max_target_length = 64
    vocab_size = VOCAB_SIZE
    repeats_steps = True
    start_ids = (START_ID,)
    eos_ids = (EOS_ID,)

    def __init__(
        self,
        num_slots: int,
        *,
        is_recurrent: bool = False,
        shares_memory: bool = False,
        fail_encode: int | None = None,
        fail_steps: Iterable[int] = (),
    ) -> None:
        self.num_slots = num_slots
        self.has_decode = not is_recurrent
        self.shares_memory = shares_memory
        self.memory: list[tuple[int, ...] | None] = [None] * num_slots
        self.cache: list[list[int]] = [[] for _ in range(num_slots)]
        self.num_steps = 0
        self.batch_sizes: list[int] = []
        self.encoded: list[list[tuple[int, ...]]] = []
        self.is_closed = False
        self.adapters: dict[int, Weights] = {}
        self._fail_encode = fail_encode
        self._fail_steps = frozenset(fail_steps)

    def warm_up(self) -> None:
        """Nothing to do."""

    def encode(self, first_row: int, requests: list[Request]) -> None:
        sources = [tuple(request.sources[SOURCE].tolist()) for request in requests]
        self.encoded.append(sources)
        if any(source[0] == self._fail_encode for source in sources):
            raise RuntimeError("this encode was told to fail")
        for row, source in enumerate(sources, first_row):
            self.memory[row] = source
            self.cache[row] = []

    def prefill(self, first_row: int, sequences: tuple[Sequence, ...]) -> list[list[float]]:
        assert self.has_decode
        for row, sequence in enumerate(sequences, first_row):
            self.cache[row] = [*sequence.search.start_ids, *sequence.token_ids][:-1]
        return [
            [-float(token) for token in (*sequence.token_ids, EOS_ID)] if sequence.request.is_score else []
            for sequence in sequences
        ]

    def step(self, rows: tuple[Sequence, ...], num_steps: int = 1) -> Selected:
        self.num_steps += 1
        if self.num_steps - 1 in self._fail_steps:
            raise RuntimeError("this step was told to fail")
        self.batch_sizes.append(len(rows))
        tokens, branches, attention, wanted = [], {}, {}, {}
        if self.shares_memory:
            keeping = {sequence.search.memory_owner.row for sequence in rows if sequence.search.memory_owner}
            self.memory = [memory if row in keeping else None for row, memory in enumerate(self.memory)]
        num_running = len({sequence.row for sequence in rows})
        for row, sequence in enumerate(rows):  # after the running ones, those of drafts
            assert sequence.row == row or row >= num_running
            slot = sequence.row
            assert slot is not None
            memory = self._memory_of(sequence)
            before = self.cache[slot][: sequence.cache_length] if self.has_decode else self.cache[slot]
            assert len(before) == sequence.cache_length or not self.has_decode
            fed = self.cache[slot] = [*before, sequence.next_token_id]
            tokens.append(next_token(memory, fed))
            if not self.has_decode and sequence.request.attention:
                attention[row] = attended(memory, fed)[-1:]
            if sequence.request.is_score:
                if not self.has_decode:
                    label = EOS_ID if sequence.forced_id is None else sequence.forced_id
                    branches[row] = Branches([label], [-float(label)])
            elif sequence.detects:
                tokens[-1] = detected_id(memory, sequence.request.detected_ids)
                branches[row] = Branches(tokens[-1:], [-0.5])
            elif not sequence.is_plain:
                is_beam, count = sequence.request.beam is not None, sequence.num_branches
                ways = ways_to_go_on(memory, fed, None if is_beam else sequence.index)
                tokens[-1] = ways.token_ids[0]
                alternatives = tuple(zip(ways.token_ids, ways.log_probabilities, strict=True))
                listed = alternatives[: sequence.request.num_alternatives]
                branches[row] = Branches(ways.token_ids[:count], ways.log_probabilities[:count], listed)
                if sequence.progress is not None:
                    ids = sequence.request.terms.wanted(sequence.progress)
                    wanted[row] = {token_id: dict(alternatives)[token_id] for token_id in ids}
        further = list[list[int]]()
        for _ in range(num_steps - 1):
            assert not branches
            assert not attention
            for row, token in enumerate(further[-1] if further else tokens):
                self.cache[row] = [*self.cache[row], token]
            further.append([next_token(self._memory_of(row), self.cache[row.row]) for row in rows])
        return replace(selected(rows, tokens, branches, attention, wanted), further=tuple(further))

    def _memory_of(self, sequence: Sequence) -> tuple[int, ...]:
        owner = sequence.search.memory_owner if self.shares_memory else sequence
        assert owner is not None
        assert owner.row is not None
        memory = self.memory[owner.row]
        assert memory is not None
        return memory

    def move(self, moves: Iterable[Move]) -> int:
        num_bytes = 0
        for move in moves:
            if move.memory_length:
                self.memory[move.to_row] = self.memory[move.from_row]
            if not self.has_decode:
                self.cache[move.to_row] = self.cache[move.from_row]
            elif move.cache_length:
                shared = self.cache[move.to_row][: move.num_shared]
                self.cache[move.to_row] = shared + self.cache[move.from_row][len(shared) : move.cache_length]
            num_bytes += move.cache_length + move.memory_length
        return num_bytes

    def write_adapter(self, place: int, weights: Weights) -> None:
        self.adapters[place] = weights

    def align(
        self,
        row: int,
        first_position: int,
        target_ids: tuple[int, ...],
        memory_length: int,
        adapter: int = -1,
    ) -> Array:
        memory, before = self.memory[row], self.cache[row][:first_position]
        assert memory is not None
        assert len(memory) == memory_length
        assert len(before) == first_position
        self.cache[row] = [*before, *target_ids]
        return attended(memory, self.cache[row])[first_position:]

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
