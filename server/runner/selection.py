"""Selects the tokens of rows that need more than the most probable one, by graphs over the step's logits.

Logits stay on the device. Each graph runs over the rows that need it, and not at all in steps without such
rows. A row's tokens do not depend on the other rows.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from seq2seq_serve.bundle import names
from seq2seq_serve.server.engine.constraints import adjustments, penalties, time_bounds
from seq2seq_serve.server.engine.plan import NOTHING_WANTED, Branches, Candidates, Selected, Wanted
from seq2seq_serve.server.engine.request import Array, Request, Sampling
from seq2seq_serve.server.engine.result import Alternatives
from seq2seq_serve.server.engine.state import Sequence
from seq2seq_serve.server.runner.buffers import Columns
from seq2seq_serve.server.runner.device import CPU, OnnxDevice

_CHANGED = names.out(names.LOGITS)
_NO_PENALTY = 0  # the row of penalties that stays zero
# The graphs that requests to any model may need
_GRAPHS = (
    "adjust",
    "penalize",
    "normalize",
    "candidates",
    "best",
    "sample",
    "sample_sorted",
    "sample_top_p",
    "score",
)
_NUM_LIKELY = 1024  # candidates, which are enough for almost every `top_p`
_MOST_LISTED = 16  # suppressed tokens of a request that join those of the model; more become penalties

_Penalized = tuple[frozenset[int], frozenset[tuple[int, float]]]
_Picked = list[list[list[Any]]]  # token ids and log-probabilities, (m, K) each


class _Logits(NamedTuple):
    """Logits `(m, V)` on the device, or what became of them.

    Attributes:
        bind_input: Binds them as a graph's input.
        bind_output: Binds them as the output of a graph that changes them in place.
    """

    bind_input: Callable[[Any], None]
    bind_output: Callable[[Any], None]


class _Kind(NamedTuple):
    """The way in which a row's tokens are selected.

    Attributes:
        graph: The graph that selects them.
        num_candidates: The number of tokens that it sorts; 0 if the rows decide.
        is_normalized: Whether log-probabilities are changed instead of logits.
        is_beam: Whether the rows are those of beams.
    """

    graph: str
    num_candidates: int = 0
    is_normalized: bool = False
    is_beam: bool = False


_NUM_WANTED = attrgetter("request.num_alternatives", "num_branches")
# What decides how a row's tokens are selected
_WAY = attrgetter("request.free_beam", "is_plain", "detects")
_FREE_BEAMS = {("alone", False, False)}
_FREE_BEAMS_WITH_TERMS = _FREE_BEAMS | {("with terms", False, False)}
_CANDIDATES, _BEAM = _Kind("candidates"), _Kind("candidates", is_beam=True)


class _Ask(NamedTuple):
    """One selection for a row; a row with several samples needs one for each sample.

    Attributes:
        uniform: The uniform number that decides a draw.
        changes: The changes of the row's logits, by its constraints and its target so far.
    """

    row: int
    sequence: Sequence
    uniform: float
    changes: Mapping[int, tuple[float, float]]


_ANY_PLACE = np.zeros((1, 2), np.int64)  # some nodes of CUDA do not take arrays without elements


def choice(rows: Collection[Sequence], vocab_size: int, *, looks_up: bool) -> tuple[int, Wanted]:
    """Returns what decides every row, if the step itself selects tokens.

    Args:
        rows: The rows of a step.
        vocab_size: V.
        looks_up: Whether the step also looks up log-probabilities.

    Returns:
        How many of the most probable tokens; 0 if some row needs logits. And the tokens that terms want.
    """
    ways = {way for way in set(map(_WAY, rows)) if not way[1]}
    if not ways:
        return 1, NOTHING_WANTED
    if not ways <= (_FREE_BEAMS_WITH_TERMS if looks_up else _FREE_BEAMS):
        return 0, NOTHING_WANTED
    wanted = NOTHING_WANTED if ways == _FREE_BEAMS else Wanted.by(rows)
    return _num_wanted(rows, vocab_size), wanted


def _num_wanted(rows: Collection[Sequence], vocab_size: int) -> int:
    """Returns how many of the most probable tokens are as many as any row needs."""
    wanted: int = max(map(max, set(map(_NUM_WANTED, rows))))
    return min(wanted, vocab_size)


def table_of(
    rows: Collection[Sequence], token_ids: Array, log_probabilities: Array, wanted: Wanted, found: Array
) -> tuple[Candidates]:
    """Returns the candidates `(B, K)` of all rows of a step."""
    places = {row: row for row in range(len(rows))}
    return (Candidates(places, token_ids, log_probabilities, wanted, found),)


class Selector:
    """Selects tokens by the requests' options; it does not know the model. Owned by the runner.

    Args:
        columns: The logits, and the ids that the next step is fed.
        vocab_size: V.
        eos_ids: The tokens that end a target.
        device: Runs the graphs.
        never_ids: The tokens that the model never selects.
        has_times: Whether the model writes times.
        detects: Whether the model detects a start token.
    """

    def __init__(
        self,
        columns: Columns,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        device: OnnxDevice,
        never_ids: frozenset[int] = frozenset(),
        *,
        has_times: bool = False,
        detects: bool = False,
    ) -> None:
        self._columns = columns
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._device = device
        self._never_ids = never_ids
        self._sorted_never_ids = np.array(sorted(never_ids), np.int64)
        some = {"suppress": bool(never_ids), "times": has_times, "detect": detects}
        graphs = (*_GRAPHS, *(name for name, is_needed in some.items() if is_needed))
        self._sessions = {name: device.weightless(name) for name in graphs}
        self._penalty_rows: dict[Request, int] = {}  # of those that ran when a row was last needed, and later
        self._written: dict[_Penalized, int] = {}  # the same rows by their content

    def select(self, rows: tuple[Sequence, ...], token_ids: list[int]) -> Selected:
        """Replace the most probable ids by the selected ones, in the result and in the next step's input.

        Args:
            rows: The rows of the step.
            token_ids: The most probable id of each row.
        """
        if set(map(_WAY, rows)) <= _FREE_BEAMS_WITH_TERMS:
            return self._select_beams(rows, token_ids)
        groups: dict[_Kind, list[_Ask]] = defaultdict(list)
        failures: dict[int, Exception] = {}
        for row, sequence in enumerate(rows):
            if sequence.is_plain:
                continue
            try:
                self._keep_penalties(sequence.request, rows)
                kind, asks = self._asks(row, sequence)
            except Exception as error:
                failures[row] = error
            else:
                groups[kind] += asks
        branches: dict[int, Branches] = {}
        candidates: list[Candidates] = []
        for kind, asks in groups.items():
            logits = self._constrained(kind, asks, len(rows))
            if kind.is_beam:
                sequences = [ask.sequence for ask in asks]
                wanted = Wanted.by(sequences)
                best_ids, log_probabilities, found = self._best(kind.graph, sequences, logits, wanted)
                places = {ask.row: place for place, ask in enumerate(asks)}
                candidates.append(Candidates(places, best_ids, log_probabilities, wanted, found))
            else:
                self._branch(kind, asks, logits, token_ids, branches)
        self._columns.write_token_ids(token_ids)
        return Selected(token_ids, branches, tuple(candidates), failures)

    def _select_beams(self, rows: tuple[Sequence, ...], token_ids: list[int]) -> Selected:
        """Does what `select` does, in less time, if all rows are those of beams without constraints."""
        logits = self._rows(0, len(rows))
        if self._never_ids:
            self._suppress(logits, [row.request for row in rows])
        wanted = Wanted.by(rows)
        best_ids, log_probabilities, found = self._best(_BEAM.graph, rows, logits, wanted)
        candidates = table_of(rows, best_ids, log_probabilities, wanted, found)
        return Selected(token_ids, candidates=candidates)

    def _branch(
        self,
        kind: _Kind,
        asks: list[_Ask],
        logits: _Logits,
        token_ids: list[int],
        branches: dict[int, Branches],
    ) -> None:
        """Select the tokens of rows outside of beams, into `token_ids` and `branches`."""
        best: _Picked | None = None
        is_ranked = kind == _CANDIDATES
        if is_ranked or any(ask.sequence.request.num_alternatives for ask in asks):
            sequences = [ask.sequence for ask in asks]
            best = [values.tolist() for values in self._best(kind.graph, sequences, logits)[:2]]
        picked: _Picked | None
        if kind.graph == "score":
            labels = [self._label(ask.sequence) for ask in asks]
            picked = self._run(kind.graph, logits, {names.LABEL_IDS: np.array(labels)[:, None]})
        elif kind.graph == "detect":
            detected_ids = asks[0].sequence.request.detected_ids  # those of the model
            picked = self._run(kind.graph, logits, {names.DETECTED_IDS: np.array(detected_ids)})
        else:
            picked = best if is_ranked else self._draw(kind, asks, logits)
        assert picked is not None
        for i, ask in enumerate(asks):
            if ask.row not in branches:
                token_ids[ask.row] = picked[0][i][0]
                branches[ask.row] = Branches([], [], _alternatives(best, i, ask.sequence))
            num_picked = ask.sequence.num_branches if is_ranked else 1
            branches[ask.row].token_ids.extend(picked[0][i][:num_picked])
            branches[ask.row].log_probabilities.extend(picked[1][i][:num_picked])

    def _best(
        self, graph: str, sequences: Collection[Sequence], logits: _Logits, wanted: Wanted = NOTHING_WANTED
    ) -> list[Array]:
        """Returns the most probable tokens, as many as any row needs, and their log-probabilities: (m, K).

        The third array has the log-probabilities of the wanted tokens, (p,).
        """
        feeds = {
            names.NUM_CANDIDATES: np.array([_num_wanted(sequences, self._vocab_size)]),
            names.PLACES: wanted.places if len(wanted.places) else _ANY_PLACE,
        }
        name = "best" if graph == "best" else "candidates"
        *best, found = self._outputs(name, logits, feeds, names.FOUND)
        return [*best, found[: len(wanted.places)]]

    def _asks(self, row: int, sequence: Sequence) -> tuple[_Kind, list[_Ask]]:
        """Returns the way in which a row's tokens are selected, and the row's selections."""
        request = sequence.request
        if request.is_score or sequence.detects:
            return _Kind("score" if request.is_score else "detect"), [_Ask(row, sequence, 0.0, {})]
        changes: dict[int, tuple[float, float]] = {}
        if request.constraints.change_logits or (request.begin_suppressed_ids and not sequence.num_generated):
            changes = adjustments(sequence, self._eos_ids, self._vocab_size, self._never_ids)
        sampling = request.sampling
        if sampling is None:
            asks = [_Ask(row, sequence, 0.0, changes)]
            if request.beam is None:
                return _CANDIDATES, asks
            if not request.constraints.change_log_probabilities:
                return _BEAM, asks
            graph = "candidates" if request.constraints.is_renormalized else "best"
            return _Kind(graph, is_normalized=True, is_beam=True), asks
        uniforms = (
            uniform(sampling.seed, sample, sequence.num_generated)
            for sample in range(sequence.index, sequence.index + sequence.num_branches)
        )
        asks = [_Ask(row, sequence, each, changes) for each in uniforms]
        return _drawing(sampling, self._vocab_size), asks

    def _label(self, sequence: Sequence) -> int:
        """Returns the next token id of a scored target."""
        return self._eos_ids[0] if sequence.forced_id is None else sequence.forced_id

    def _keep_penalties(self, request: Request, rows: tuple[Sequence, ...]) -> None:
        """Give a new request a row of penalties on the device: that of equal ones, or of nobody any more."""
        constraints = request.constraints
        is_penalized = constraints.suppressed_token_ids or constraints.logit_bias
        if not is_penalized or self._is_listed(request) or request in self._penalty_rows:
            return
        num_rows = self._columns.num_rows
        row = self._written.get(constraints.penalized)
        if row is None or len(self._penalty_rows) > 2 * num_rows:
            running = {sequence.request for sequence in rows}
            self._penalty_rows = {one: kept for one, kept in self._penalty_rows.items() if one in running}
            taken = {row, *self._penalty_rows.values()}
            self._written = {one: kept for one, kept in self._written.items() if kept in taken}
        if row is None:
            row = next(free for free in range(1, 1 + num_rows) if free not in taken)
            self._columns.write_penalties(row, penalties(constraints, self._eos_ids))
            self._written[constraints.penalized] = row
        self._penalty_rows[request] = row

    def _is_listed(self, request: Request) -> bool:
        """Whether a request only suppresses a few tokens, beside those that the model never selects."""
        constraints = request.constraints
        num_suppressed = len(constraints.suppressed_token_ids)
        is_allowed = bool(self._never_ids) and not request.is_score and not constraints.logit_bias
        return is_allowed and num_suppressed <= _MOST_LISTED

    def _constrained(self, kind: _Kind, asks: list[_Ask], num_rows: int) -> _Logits:
        """Returns the logits of the selections with all constraints, each ask's in its own row.

        Args:
            kind: That of the selections.
            asks: The selections.
            num_rows: The rows of the step.
        """
        logits = self._adjusted(asks, num_rows, is_normalized=kind.is_normalized)
        if kind.graph == "detect":  # constraints are for targets
            return logits
        rows = [self._penalty_rows.get(ask.sequence.request, _NO_PENALTY) for ask in asks]
        if any(rows):
            logits = self._penalized(logits, rows)
        if self._never_ids and kind.graph != "score":
            self._suppress(logits, [ask.sequence.request for ask in asks])
        if any(ask.sequence.request.constraints.times is not None for ask in asks):
            logits = self._change("times", logits.bind_input, self._time_feeds(asks))
        return logits

    def _penalized(self, logits: _Logits, rows: list[int]) -> _Logits:
        """Returns logits without the penalties of these rows."""

        def bind_both(binding: Any) -> None:
            logits.bind_input(binding)
            self._columns.bind_penalties(self._device.bind_input, binding, names.PENALTIES)

        return self._change("penalize", bind_both, {names.PENALTY_ROWS: np.array(rows)})

    def _time_feeds(self, asks: list[_Ask]) -> dict[str, Array]:
        """Returns the bounds of the rows' texts and times."""
        # of a row without times: none of its tokens is one, and all are allowed
        free = self._vocab_size, 0, 0, self._vocab_size, 0, 0
        bounds = np.array([free] * len(asks), np.int64)
        for i, ask in enumerate(asks):
            times = ask.sequence.request.constraints.times
            if times is not None:
                allowed = time_bounds(ask.sequence, times, self._eos_ids, self._vocab_size)
                bounds[i] = times.first_id, times.last_id, *allowed
        return {name: bounds[:, i : i + 1].copy() for i, name in enumerate(names.TIME_COLUMNS)}

    def _suppress(self, logits: _Logits, requests: list[Request]) -> None:
        """Forbid the tokens that the model never selects, and the few that requests suppress, in place."""
        listed = [
            request.constraints.suppressed_token_ids.difference(self._eos_ids)
            if self._is_listed(request)
            else frozenset[int]()
            for request in requests
        ]
        num_never, most = len(self._never_ids), max(map(len, listed))
        never_ids = np.empty((len(requests), num_never + most), np.int64)
        never_ids[:, :num_never] = self._sorted_never_ids
        never_ids[:, num_never:] = self._sorted_never_ids[0]  # an id may stand twice
        for row, ids in enumerate(listed):
            never_ids[row, num_never : num_never + len(ids)] = list(ids)
        binding = self._bound("suppress", logits.bind_input, {names.SUPPRESSED_IDS: never_ids})
        logits.bind_output(binding)
        self._sessions["suppress"].run_with_iobinding(binding)

    def _rows(self, first_row: int, num_rows: int) -> _Logits:
        """Returns the step's own logits of consecutive rows."""
        bind = functools.partial(self._columns.bind_logits, num_rows=num_rows, first_row=first_row)
        return _Logits(
            lambda binding: bind(self._device.bind_input, binding),
            lambda binding: bind(self._device.bind_output, binding, name=_CHANGED),
        )

    def _adjusted(self, asks: list[_Ask], num_rows: int, *, is_normalized: bool) -> _Logits:
        """Returns the logits of the selections, changed by their targets so far."""
        first = asks[0].row
        is_whole = all(ask.row == row and not ask.changes for row, ask in enumerate(asks, first))
        logits = self._rows(first, len(asks)) if is_whole else self._rows(0, num_rows)
        if is_normalized:
            logits = self._change("normalize", logits.bind_input, {})
        if is_whole:
            return logits
        longest = max(1, *(len(ask.changes) for ask in asks))
        ids = np.zeros((len(asks), longest), np.int64)
        factors, biases = np.ones(ids.shape, np.float32), np.zeros(ids.shape, np.float32)
        for i, ask in enumerate(asks):
            if changes := ask.changes:
                ids[i], (factors[i], biases[i]) = next(iter(changes.items()))  # the padding repeats the first
                ids[i, : len(changes)] = list(changes)
                factors[i, : len(changes)], biases[i, : len(changes)] = zip(*changes.values(), strict=True)
        feeds = {
            names.ROWS: np.array([ask.row for ask in asks]),
            names.ADJUSTED_IDS: ids,
            names.FACTORS: factors,
            names.BIASES: biases,
        }
        return self._change("adjust", logits.bind_input, feeds)

    def _change(self, graph: str, bind_input: Callable[[Any], None], feeds: dict[str, Array]) -> _Logits:
        """Runs a graph that changes logits, on the device; returns its result."""
        binding = self._bound(graph, bind_input, feeds)
        self._device.bind_new_output(binding, _CHANGED)
        self._sessions[graph].run_with_iobinding(binding)
        changed = binding.get_outputs()[0]
        return _Logits(
            lambda binding: binding.bind_ortvalue_input(names.LOGITS, changed),
            lambda binding: binding.bind_ortvalue_output(_CHANGED, changed),
        )

    def _draw(self, kind: _Kind, asks: list[_Ask], logits: _Logits) -> _Picked:
        """Draws a token for each selection; if candidates may be missing, draws again from all tokens."""
        graph, num_candidates = kind.graph, kind.num_candidates
        samplings = [s for ask in asks if (s := ask.sequence.request.sampling)]
        feeds = {
            names.TEMPERATURES: _column([s.temperature for s in samplings]),
            names.MIN_PS: _column([s.min_p for s in samplings]),
            names.UNIFORMS: np.array([[ask.uniform] for ask in asks]),
        }
        if num_candidates:
            feeds[names.NUM_CANDIDATES] = np.array([num_candidates])
            feeds[names.TOP_PS] = _column([s.top_p for s in samplings])
        if graph == "sample_sorted":
            feeds[names.TOP_KS] = np.array([min(s.top_k, self._vocab_size) for s in samplings])[:, None]
        if graph != "sample_top_p":
            return self._run(graph, logits, feeds)
        *picked, is_covered = self._run(graph, logits, feeds, names.IS_COVERED)
        if num_candidates == self._vocab_size or all(one for (one,) in is_covered):
            return picked
        return self._draw(kind._replace(num_candidates=self._vocab_size), asks, logits)

    def _run(self, graph: str, logits: _Logits, feeds: dict[str, Array], *more: str) -> _Picked:
        """Runs a graph; returns its token ids and log-probabilities, and `more` of its outputs, as lists."""
        return [values.tolist() for values in self._outputs(graph, logits, feeds, *more)]

    def _outputs(self, graph: str, logits: _Logits, feeds: dict[str, Array], *more: str) -> list[Array]:
        """Runs a graph; returns its token ids and log-probabilities, and `more` of its outputs."""
        binding = self._bound(graph, logits.bind_input, feeds)
        for name in (names.TOKEN_IDS, names.LOG_PROBABILITIES, *more):
            binding.bind_output(name, CPU)
        self._sessions[graph].run_with_iobinding(binding)
        return [value.numpy() for value in binding.get_outputs()]

    def _bound(self, graph: str, bind_input: Callable[[Any], None], feeds: dict[str, Array]) -> Any:
        """Returns a binding of a graph's inputs."""
        binding = self._sessions[graph].io_binding()
        bind_input(binding)
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        return binding


def uniform(seed: int, sample: int, position: int) -> float:
    """Returns a number from 0 up to, not including, 1: a counter-based generator without state.

    The first 53 bits of BLAKE2b (RFC 7693) over seed, sample and position.
    """
    message = b"".join(number.to_bytes(8, "little") for number in (seed, sample, position))
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def _drawing(sampling: Sampling, vocab_size: int) -> _Kind:
    """Returns the way in which a token is drawn.

    For a `top_k` the number is a power of four: rows of any `top_k` form few groups, and no group sorts many
    more candidates than its rows need.
    """
    if sampling.top_k:
        num_candidates = 1 << (((sampling.top_k - 1).bit_length() + 1) // 2 * 2)
        return _Kind("sample_sorted", min(num_candidates, vocab_size))
    return _Kind("sample_top_p", min(_NUM_LIKELY, vocab_size)) if sampling.top_p < 1 else _Kind("sample")


def _column(values: list[float]) -> Array:
    return np.array(values, np.float32)[:, None]  # (m, 1)


def _alternatives(best: _Picked | None, i: int, sequence: Sequence) -> Alternatives:
    wanted = sequence.request.num_alternatives
    if best is None or not wanted:
        return ()
    return tuple(zip(best[0][i][:wanted], best[1][i][:wanted], strict=True))
