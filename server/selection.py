"""Selects the tokens of rows that ask for more than the most probable one, by graphs over the step's logits.

Logits stay on the device. A step pays only for what one of its rows asked for: each graph runs over the rows
that need it. What a row gets does not depend on the others.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import numpy as np

from bundle import names
from server.buffers import Columns, Device
from server.constraints import adjustments
from server.records import Array, Choice, Sampling, Selected, Sequence

_ADJUSTED = names.out(names.LOGITS)
_NO_ADJUSTMENT = {0: (1.0, 0.0)}


class Selector:
    """Owned by the runner; knows the requests' options, and nothing of how a model computes.

    Args:
        columns: Has the logits, and takes the ids that the next step is fed.
        vocab_size: V.
        eos_id: What ends a target.
        device: Where the graphs run.
    """

    def __init__(self, columns: Columns, vocab_size: int, eos_id: int, device: Device) -> None:
        self._columns = columns
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._device = device
        graphs = ("adjust", "candidates", "sample", "sample_sorted")
        self._sessions = {name: device.weightless(name) for name in graphs}

    def select(self, rows: tuple[Sequence, ...], token_ids: list[int]) -> Selected:
        """Replace the most probable ids by the selected ones, here and where the next step reads them.

        Args:
            rows: Of the step.
            token_ids: The most probable id of each row.
        """
        groups: dict[tuple[str, int], list[int]] = defaultdict(list)
        for row, sequence in enumerate(rows):
            request = sequence.request
            if sequence.is_plain:
                continue
            if request.sampling is None:
                groups["candidates", 0].append(row)
            else:
                num_candidates = _num_candidates(request.sampling, self._vocab_size)
                groups["sample_sorted" if num_candidates else "sample", num_candidates].append(row)
        choices: dict[int, Choice] = {}
        for (graph, num_candidates), chosen in groups.items():
            sequences = [rows[row] for row in chosen]
            logits = self._adjust(chosen, sequences, len(rows))
            wanted = max(sequence.request.num_alternatives for sequence in sequences)
            best: tuple[Array, Array] | None = None
            if graph == "candidates" or wanted:
                num_best = min(max(wanted, 1), self._vocab_size)
                best = self._run("candidates", logits, {names.NUM_CANDIDATES: np.array([num_best])})
            picked = best if graph == "candidates" else self._draw(graph, num_candidates, sequences, logits)
            assert picked is not None
            for i, row in enumerate(chosen):
                token_ids[row] = int(picked[0][i, 0])
                choices[row] = _choice(picked, best, i, sequences[i].request.num_alternatives)
        self._columns.write_token_ids(token_ids)
        return Selected(token_ids, choices)

    def _adjust(self, chosen: list[int], sequences: list[Sequence], num_rows: int) -> Any:
        """The logits of the chosen rows under their requests' constraints, on the device."""
        changes = [
            adjustments(
                sequence.request.constraints,
                sequence.token_ids,
                num_generated=sequence.num_generated,
                eos_id=self._eos_id,
                vocab_size=self._vocab_size,
            )
            or _NO_ADJUSTMENT
            for sequence in sequences
        ]
        longest = max(map(len, changes))
        ids = np.empty((len(chosen), longest), np.int64)
        factors, biases = np.empty(ids.shape, np.float32), np.empty(ids.shape, np.float32)
        for i, change in enumerate(changes):
            padding = [next(iter(change))] * (longest - len(change))  # the first again changes nothing more
            ids[i] = [*change, *padding]
            factors[i] = [change[token_id][0] for token_id in ids[i]]
            biases[i] = [change[token_id][1] for token_id in ids[i]]
        session = self._sessions["adjust"]
        binding = session.io_binding()
        self._columns.bind_logits(self._device.bind_input, binding, num_rows)
        feeds = {
            names.ROWS: np.array(chosen),
            names.ADJUSTED_IDS: ids,
            names.FACTORS: factors,
            names.BIASES: biases,
        }
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        self._device.bind_new_output(binding, _ADJUSTED)
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0]

    def _draw(
        self, graph: str, num_candidates: int, sequences: list[Sequence], logits: Any
    ) -> tuple[Array, Array]:
        samplings = [sequence.request.sampling for sequence in sequences]
        positions = [sequence.num_generated for sequence in sequences]
        feeds = {
            names.TEMPERATURES: _column([s.temperature for s in samplings if s]),
            names.MIN_PS: _column([s.min_p for s in samplings if s]),
            names.UNIFORMS: np.array(
                [[uniform(s.seed, place)] for s, place in zip(samplings, positions, strict=True) if s]
            ),
        }
        if num_candidates:
            feeds[names.NUM_CANDIDATES] = np.array([num_candidates])
            feeds[names.TOP_PS] = _column([s.top_p for s in samplings if s])
        return self._run(graph, logits, feeds)

    def _run(self, graph: str, logits: Any, feeds: dict[str, Array]) -> tuple[Array, Array]:
        """Token ids and log-probabilities, `(m, K)` each."""
        session = self._sessions[graph]
        binding = session.io_binding()
        binding.bind_ortvalue_input(names.LOGITS, logits)
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name in (names.TOKEN_IDS, names.LOG_PROBABILITIES):
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        token_ids, log_probabilities = (value.numpy() for value in binding.get_outputs())
        return token_ids, log_probabilities


def uniform(seed: int, position: int) -> float:
    """A number from 0 up to 1 that depends on nothing else: a counter-based generator.

    The first 53 bits of BLAKE2b (RFC 7693) over seed and position.
    """
    message = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def _num_candidates(sampling: Sampling, vocab_size: int) -> int:
    """How many of the best tokens are candidates; 0 where all are, in the order of their ids.

    It is the row's own number, not the batch's: sums over another number may round otherwise.
    """
    if sampling.top_k:
        return min(sampling.top_k, vocab_size)
    return vocab_size if sampling.top_p < 1 else 0


def _column(values: list[float]) -> Array:
    return np.array(values, np.float32)[:, None]  # (m, 1)


def _choice(
    picked: tuple[Array, Array], best: tuple[Array, Array] | None, i: int, num_alternatives: int
) -> Choice:
    if best is None:
        return Choice(float(picked[1][i, 0]))
    ids, log_probabilities = best[0][i, :num_alternatives].tolist(), best[1][i, :num_alternatives].tolist()
    return Choice(float(picked[1][i, 0]), tuple(zip(ids, log_probabilities, strict=True)))
