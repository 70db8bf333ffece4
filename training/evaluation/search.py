"""Greedy search and beam search by definition: the server is tested against them.

`beam_search`, for one source, decodes the whole prefix again at every step. `greedy_search` and
`beam_searches`, for many sources, use the model's `step` instead. All take a model in eval mode, sources as
the model's kind encodes them (texts with eos at their end), `bos_id` with which every target starts, and
`eos_id` which ends a target. `max_new_tokens` limits the generated tokens, those after a forced prefix, eos
included. They raise ValueError if a source is empty or too long, or a limit is wrong.

Shapes: B batch rows, S source length, T target length, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seq2seq_serve.bundle.manifest import EarlyStopping, LengthPenalty
from seq2seq_serve.training.models.base import EncoderDecoder, Memory, State, select_rows

Adjust = Callable[[Tensor, Sequence[int]], Tensor]
"""Turns the logits (V,) of the token after a target, without bos, into those by which it is selected."""

_ROWS_AT_ONCE = 256
_SCORES_AT_ONCE = 2**24  # of a head of an encoder's self-attention: a sound has 1,500² of them


def in_float64(logits: Tensor, _target_ids: Sequence[int]) -> Tensor:
    """The logits of the model."""
    return logits.double()


@dataclass(frozen=True)
class Hypothesis:
    """A candidate target.

    Attributes:
        token_ids: The forced prefix and the generated tokens, without bos and eos.
        log_probabilities: One of each generated token, eos included.
        score: The log-probability divided by the length penalty, by which hypotheses are ranked.
        is_finished: Whether it ended with eos, not at the limit.
    """

    token_ids: list[int]
    log_probabilities: list[float]
    score: float
    is_finished: bool

    @property
    def log_probability(self) -> float:
        return sum(self.log_probabilities)


def length_penalty(num_tokens: int, alpha: float, formula: LengthPenalty = "wu") -> float:
    """(5 + |Y|)^alpha / (5 + 1)^alpha: Wu et al. 2016, equation 14, arXiv:1609.08144; or |Y|^alpha.

    |Y| counts the generated tokens, with eos and without a forced prefix. The coverage penalty is not used.
    """
    return float(num_tokens**alpha if formula == "power" else (5 + num_tokens) ** alpha / 6**alpha)


class SourceLengthError(ValueError):
    """The source of a `row`, from 0, is empty or too long for the model."""

    def __init__(self, row: int, length: int, limit: int, unit: str) -> None:
        super().__init__(f"a source has {length} {unit}, and the model takes 1 to {limit}")
        self.row = row


@torch.inference_mode()
def greedy_search(
    model: EncoderDecoder,
    source_ids: Sequence[Sequence[int]],
    *,
    bos_id: int,
    eos_id: int,
    max_new_tokens: int | Sequence[int],
    prefix_ids: Sequence[int] = (),
    before_step: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Take the most probable token at each step, of equal ones the lowest id; many sources at once.

    Returns each target's token ids without bos, `prefix_ids`, which are read after it, and eos.
    `max_new_tokens` is one limit, or one for each source. `before_step` is called before each step, and may
    raise to end the search.
    """
    limits = [max_new_tokens] * len(source_ids) if isinstance(max_new_tokens, int) else max_new_tokens
    for limit in set(limits):
        check_limits(model, source_ids, limit, prefix_ids)
    targets: list[list[int]] = [[] for _ in source_ids]
    for running, memory, source_mask, state, token_ids in _started(model, source_ids, bos_id, prefix_ids):
        while running:
            before_step()
            states, state = model.step(token_ids, state, memory, source_mask)
            token_ids = model.project(states).float().argmax(dim=-1)  # (B,)
            next_ids = token_ids.tolist()
            for row, token_id in zip(running, next_ids, strict=True):
                if token_id != eos_id:
                    targets[row].append(token_id)
            is_running = [
                token_id != eos_id and len(targets[row]) < limits[row]
                for row, token_id in zip(running, next_ids, strict=True)
            ]
            running = [row for row, runs in zip(running, is_running, strict=True) if runs]
            memory, state = select_rows(memory, is_running), select_rows(state, is_running)
            source_mask, token_ids = source_mask[is_running], token_ids[is_running]
    return targets


def _started(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    bos_id: int,
    prefix_ids: Sequence[int],
    rows_of_a_source: int = 1,
) -> Iterator[tuple[list[int], Memory, Tensor, State, Tensor]]:
    """Starts the decoding of sources of similar length at once.

    Yields the numbers of B sources, their memory, their mask (B, S), the state after the prefix without its
    last token, and that token (B,), or bos.
    """
    length = model.source_kind.length
    by_length = sorted(range(len(sources)), key=lambda number: length(sources[number]))
    most = max(_ROWS_AT_ONCE // rows_of_a_source, 1)
    while by_length:
        longest = length(sources[by_length[:most][-1]])
        count = min(max(_SCORES_AT_ONCE // longest**2, 1), most)
        batch, by_length = by_length[:count], by_length[count:]
        memory, source_mask = encode(model, [sources[number] for number in batch])
        state = model.start(memory, source_mask)
        token_ids = torch.full((len(batch),), bos_id, device=source_mask.device)
        for token_id in prefix_ids:
            _, state = model.step(token_ids, state, memory, source_mask)
            token_ids = torch.full_like(token_ids, token_id)
        yield batch, memory, source_mask, state, token_ids


@dataclass(frozen=True)
class BeamRules:
    """How hypotheses are extended and ranked, and when the search ends: the arguments of `beam_search`."""

    eos_id: int
    beam_size: int
    alpha: float
    early_stopping: EarlyStopping = True
    formula: LengthPenalty = "wu"
    adjust: Adjust = in_float64

    def __post_init__(self) -> None:
        if self.beam_size < 1:
            raise ValueError(f"beam_size is {self.beam_size}, and must be at least 1")


@torch.inference_mode()
def beam_search(
    model: EncoderDecoder,
    source_ids: Sequence[int],
    *,
    bos_id: int,
    eos_id: int,
    beam_size: int,
    alpha: float,
    max_new_tokens: int,
    prefix_ids: Sequence[int] = (),
    early_stopping: EarlyStopping = True,
    formula: LengthPenalty = "wu",
    adjust: Adjust = in_float64,
) -> list[Hypothesis]:
    """Return the best hypotheses of one source, best first, at most `beam_size`; 1 is greedy search.

    At each step every running hypothesis is extended by every token. The 2 * beam_size extensions with the
    highest log-probabilities are then taken, best first (equal ones: the better parent, then the lower id).
    An extension with eos is finished if it is among the first beam_size, and dropped otherwise; the others
    run on until beam_size hypotheses run. Hypotheses that still run at the limit are results, too. Tokens to
    which `adjust` gives minus infinity extend nothing, so there may be fewer extensions, and fewer results.

    The search stops when beam_size hypotheses are finished and, unless `early_stopping` is True, the best
    running one has a worse score: at its present length (False), or at the limit if alpha is positive
    ("never"). Further tokens have log-probabilities of at most 0, so no hypothesis can improve after "never".
    `alpha` is the exponent of the length penalty; 0 ranks by log-probability. The forced `prefix_ids` count
    neither as tokens nor in a log-probability.
    """
    rules = BeamRules(eos_id, beam_size, alpha, early_stopping, formula, adjust)
    check_limits(model, [source_ids], max_new_tokens, prefix_ids)
    memory, source_mask = encode(model, [source_ids])
    beam = _Beam(rules, prefix_ids, max_new_tokens)
    while beam.running:
        prefixes = [[bos_id, *hypothesis.token_ids] for hypothesis in beam.running]
        B = len(prefixes)
        memories = select_rows(memory, [0] * B)
        beam.extend(next_logits(model, prefixes, memories, source_mask.expand(B, -1)))  # (B, V)
    return beam.results


@torch.inference_mode()
def beam_searches(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    rules: BeamRules,
    *,
    bos_id: int,
    max_new_tokens: Sequence[int],
    prefix_ids: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """As `beam_search`, for many sources with their limits at once, and with the model's `step`."""
    for limit in set(max_new_tokens):
        check_limits(model, sources, limit, prefix_ids)
    beams = [_Beam(rules, prefix_ids, limit) for limit in max_new_tokens]
    starts = _started(model, sources, bos_id, prefix_ids, rules.beam_size)
    for batch, memory, source_mask, state, token_ids in starts:
        running = [beams[number] for number in batch]  # each has its rows one after the other
        while running:
            states, state = model.step(token_ids, state, memory, source_mask)
            logits = model.project(states).float()  # (B, V)
            parents: list[int] = []
            first = 0
            for beam in running:
                end = first + len(beam.running)
                parents += [first + parent for parent in beam.extend(logits[first:end])]
                first = end
            running = [beam for beam in running if beam.running]
            last = [hypothesis.token_ids[-1] for beam in running for hypothesis in beam.running]
            memory, state = select_rows(memory, parents), select_rows(state, parents)
            source_mask, token_ids = source_mask[parents], torch.tensor(last, device=source_mask.device)
    return [beam.results for beam in beams]


class _Beam:
    """The hypotheses of one source, while `beam_search` extends them.

    Attributes:
        running: Those that run; none once the search is over.
    """

    def __init__(self, rules: BeamRules, prefix_ids: Sequence[int], max_new_tokens: int) -> None:
        self.running = [Hypothesis(list(prefix_ids), [], 0.0, is_finished=False)]
        self._rules = rules
        self._left: list[Hypothesis] = []  # that ran at the limit
        self._finished: list[Hypothesis] = []
        self._max_new_tokens = max_new_tokens
        self._num_tokens = 0

    @property
    def results(self) -> list[Hypothesis]:
        """The best hypotheses, best first."""
        return _best(self._finished + self._left, self._rules.beam_size)

    def extend(self, logits: Tensor) -> list[int]:
        """Extend those that run, given logits (B, V); return the parent of each that runs then."""
        rules, parents = self._rules, self.running
        self._num_tokens += 1
        self.running, rows = [], []
        for rank, (parent, token_id, log_probability) in enumerate(
            _best_extensions(parents, logits, rules.adjust, 2 * rules.beam_size)
        ):
            ids = parents[parent].token_ids
            log_probabilities = [*parents[parent].log_probabilities, log_probability]
            score = sum(log_probabilities) / length_penalty(self._num_tokens, rules.alpha, rules.formula)
            if token_id != rules.eos_id and len(self.running) < rules.beam_size:
                hypothesis = Hypothesis([*ids, token_id], log_probabilities, score, is_finished=False)
                self.running.append(hypothesis)
                rows.append(parent)
            elif token_id == rules.eos_id and rank < rules.beam_size:
                self._finished.append(Hypothesis(ids, log_probabilities, score, is_finished=True))
        self._finished = _best(self._finished, rules.beam_size)
        if self.running and len(self._finished) == rules.beam_size and not self._can_improve():
            self.running = []
        elif self._num_tokens == self._max_new_tokens:
            self._left, self.running = self.running, []
        return rows if self.running else []

    def _can_improve(self) -> bool:
        """Whether the search goes on although there are enough finished hypotheses."""
        rules = self._rules
        if rules.early_stopping is True:
            return False
        at_limit = rules.early_stopping == "never" and rules.alpha > 0
        num_tokens = self._max_new_tokens if at_limit else self._num_tokens
        penalty = length_penalty(num_tokens, rules.alpha, rules.formula)
        return max(one.log_probability for one in self.running) / penalty > self._finished[-1].score


def check_limits(
    model: EncoderDecoder, sources: Sequence[Sequence[int]], max_new_tokens: int, prefix_ids: Sequence[int]
) -> None:
    """Raise ValueError if the sources, or the target with its prefix, do not fit the model."""
    limit, num_forced = model.config.max_target_length, len(prefix_ids)
    if not 1 <= max_new_tokens <= limit - num_forced:
        after = f" after a prefix of {num_forced}" if num_forced else ""
        raise ValueError(f"max_new_tokens is {max_new_tokens}{after}, and the model's limit is {limit}")
    check_sources(model, sources)


def check_sources(model: EncoderDecoder, sources: Sequence[Sequence[int]]) -> None:
    """Raise `SourceLengthError` for the first source that is empty or too long."""
    limit = model.config.max_source_length
    for row, source in enumerate(sources):
        length = model.source_kind.length(source)
        if not 1 <= length <= limit:
            raise SourceLengthError(row, length, limit, model.source_kind.unit)


def encode(model: EncoderDecoder, sources: Sequence[Sequence[int]]) -> tuple[Memory, Tensor]:
    """The memory of sources, and their mask (B, S)."""
    device = model.embedding.weight.device
    source = tuple(tensor.to(device) for tensor in model.source_kind.collate(sources))
    return model.encode(*source), source[-1]


def next_logits(
    model: EncoderDecoder, prefixes: list[list[int]], memory: Memory, source_mask: Tensor
) -> Tensor:
    """Logits (B, V) of the tokens after the prefixes, which all have the same length."""
    target_ids = torch.tensor(prefixes, device=source_mask.device)  # (B, T)
    states = model.decode_states(target_ids, memory, source_mask)  # (B, T, D)
    return model.project(states[:, -1]).float()


def _best_extensions(
    running: list[Hypothesis], logits: Tensor, adjust: Adjust, num_extensions: int
) -> list[tuple[int, int, float]]:
    """(parent, token id, the token's log-probability) of the best extensions, best first."""
    adjusted = [adjust(row, hypothesis.token_ids) for row, hypothesis in zip(logits, running, strict=True)]
    log_probabilities = torch.stack(adjusted).log_softmax(dim=-1).cpu()  # (B, V)
    sums = torch.tensor([hypothesis.log_probability for hypothesis in running], dtype=torch.float64)
    totals = (sums[:, None] + log_probabilities).flatten()  # (B * V,)
    # A stable sort keeps equal totals in the order of parent, then token id.
    order = totals.sort(descending=True, stable=True).indices[:num_extensions]
    places = [divmod(place, logits.shape[1]) for place in order.tolist() if totals[place] > -math.inf]
    return [(parent, token_id, float(log_probabilities[parent, token_id])) for parent, token_id in places]


def _best(hypotheses: list[Hypothesis], beam_size: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[:beam_size]
