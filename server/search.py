"""Extends the hypotheses of a request by the tokens that a step selected: functions over records, no tensors.

`training.search` implements the same search independently, and tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from server.records import (
    Alternatives,
    Beam,
    Branches,
    Choice,
    FinishReason,
    Hypothesis,
    Request,
    Search,
    Sequence,
)


@dataclass(frozen=True, slots=True)
class Fork:
    """A row, `child`, whose next step continues from the cache of another one.

    The scheduler copies the cache. A child without a slot first gets one, with a copy of the memory.

    Attributes:
        num_shared: Number of first positions in which the two caches are alike already.
    """

    parent: Sequence
    child: Sequence
    num_shared: int


@dataclass(eq=False, slots=True)
class _Child:
    """A hypothesis that extends the one of a row by a token."""

    parent: Sequence
    token_id: int
    log_probability: float
    alternatives: Alternatives
    index: int
    tail: bytes = b""

    @property
    def total(self) -> float:
        """The log-probability of the whole hypothesis."""
        return self.parent.log_probability + self.log_probability


def start(request: Request, start_id: int) -> Search:
    """Creates the search of a new request, with one row, whose memory the encoder will fill."""
    search = Search(request)
    prefix, num_branches = list(request.prefix_ids), request.num_hypotheses
    if request.beam is not None:
        num_branches = 2 * request.beam.size
    root = Sequence(
        search,
        next_token_id=prefix[-1] if prefix else start_id,
        source_length=request.source_length,
        num_branches=num_branches,
        token_ids=prefix,
        is_plain=request.is_plain,
    )
    search.rows.append(root)
    return search


def note(sequence: Sequence, branches: Branches) -> None:
    """Add the log-probability of a row's next token, and its alternatives where they were asked for."""
    (log_probability,) = branches.log_probabilities
    sequence.log_probability += log_probability
    if sequence.request.is_detailed:
        sequence.choices.append(Choice(log_probability, branches.alternatives))


def extend(sequence: Sequence, token_id: int, eos_id: int) -> bool:
    """Append a token to a row. Returns whether that completed its hypothesis; the row has then left."""
    request = sequence.search.request
    reason: FinishReason | None = None
    # A scored target is complete before its first step, which it only takes to keep its row.
    if token_id == eos_id or request.is_score:
        reason = FinishReason.EOS
    else:
        sequence.token_ids.append(token_id)
        sequence.next_token_id = token_id
        tail = _advanced(sequence, token_id)
        if tail is None:
            reason = FinishReason.STOP
        elif sequence.num_generated >= request.max_new_tokens:
            reason = FinishReason.LENGTH
        else:
            sequence.tail = tail
    if reason is None:
        return False
    sequence.search.rows.remove(sequence)
    sequence.search.ended[sequence.index] = _as_it_is(sequence, reason)
    return True


def branch(search: Search, branches: Mapping[int, Branches], eos_id: int) -> list[Fork]:
    """Extend the rows of a request together, each by the tokens that were selected for its slot.

    Returns:
        The rows that continue from the cache of another one. Rows that ended have left `search.rows`.
    """
    if search.request.beam is not None:
        return _place(search, _extend_beam(search, search.request.beam, branches, eos_id))
    (root,) = search.rows
    children = []
    for child in _children([root], branches, search.request.num_hypotheses):
        reason = _end(child, eos_id)
        if reason is None and root.num_generated + 1 >= search.request.max_new_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            children.append(child)
        else:
            search.ended[child.index] = _ended(child, reason)
    forks = _place(search, children)
    for row in search.rows:
        row.num_branches = 1
    return forks


def abandon(search: Search, reason: FinishReason) -> None:
    """End a request whose hypotheses are not complete."""
    if search.request.beam is not None:
        search.ended.clear()
        del search.rows[1:]
    for row in search.rows:
        search.ended[row.index] = _as_it_is(row, reason)
    search.rows.clear()


def untold(search: Search) -> dict[int, list[int]]:
    """Returns the tokens that a streaming request is sent now, by hypothesis, and counts them as sent.

    A beam's are those that all of its hypotheses share, so that none is ever taken back.
    """
    targets = {row.index: row.token_ids for row in search.rows}
    if search.request.beam is None:
        targets |= {index: list(hypothesis.token_ids) for index, hypothesis in search.ended.items()}
    elif search.rows:
        live = [row.token_ids for row in search.rows]
        live += [list(hypothesis.token_ids) for hypothesis in search.ended.values()]
        targets = {0: live[0][: min(_num_shared(live[0], target) for target in live)]}
    else:
        targets = {0: list(search.ended[0].token_ids)}
    news = {}
    for index, token_ids in targets.items():
        new = token_ids[search.num_told.get(index, 0) :]
        if new:
            search.num_told[index] = len(token_ids)
            news[index] = new
    return news


def length_penalty(num_tokens: int, alpha: float) -> float:
    """`((5 + |Y|) / 6)^alpha` of a target of so many tokens: Wu et al. 2016, equation 14, arXiv:1609.08144.

    |Y| counts the generated tokens, the end of sequence included and a prefix not.
    """
    return float(((5 + num_tokens) / 6) ** alpha)


def _extend_beam(search: Search, beam: Beam, branches: Mapping[int, Branches], eos_id: int) -> list[_Child]:
    """Returns the hypotheses that go on, best first; none where the search is over.

    Looks at the 2 * size best extensions. One that completes its hypothesis is kept in `search.ended` if it
    is among the first `size`. Of the others the first `size` go on.
    """
    num_tokens = search.rows[0].num_generated + 1
    penalty = length_penalty(num_tokens, beam.alpha)
    ended, children = list(search.ended.values()), list[_Child]()
    for child in _children(search.rows, branches, 2 * beam.size):
        if child.token_id != eos_id and len(children) == beam.size:
            continue
        reason = _end(child, eos_id)
        if reason is None:
            children.append(child)
        elif child.index < beam.size:
            ended.append(_ended(child, reason, penalty))
    ended = _best(ended, beam.size)
    if children and len(ended) == beam.size:
        # Further tokens have log-probabilities of at most 0, so only the penalty can raise a score: most at
        # the limit where alpha is positive, else with the next token. At the limit it counts as it is.
        limit = search.request.max_new_tokens
        best_length = limit if beam.alpha > 0 else min(num_tokens + 1, limit)
        bound = children[0].total / length_penalty(best_length, beam.alpha)
        if beam.early_stopping or bound <= ended[-1].score:
            children = []
    if num_tokens == search.request.max_new_tokens:
        ended += [_ended(child, FinishReason.LENGTH, penalty) for child in children]
        ended, children = _best(ended, beam.size), []
    if not children:
        del ended[search.request.num_hypotheses :]
    search.ended = dict(enumerate(ended))
    return children


def _best(hypotheses: list[Hypothesis], number: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[:number]


def _children(rows: list[Sequence], branches: Mapping[int, Branches], number: int) -> list[_Child]:
    """Returns the best extensions of some rows, best first, or those drawn from one row.

    Forbidden tokens are left out. Among equals the better parent's comes first, then the lower id.
    """
    selected = []
    for row in rows:
        assert row.row is not None
        selected.append(branches[row.row])
    totals = [
        row.log_probability + log_probability
        for row, ways in zip(rows, selected, strict=True)
        for log_probability in ways.log_probabilities
    ]
    order = list(range(len(totals)))
    if rows[0].request.sampling is None:
        order.sort(key=totals.__getitem__, reverse=True)
    width = len(totals) // len(rows)
    children = []
    for index, place in enumerate(order[:number]):
        if totals[place] > -math.inf:
            parent, way = divmod(place, width)
            ways, token_id = selected[parent], selected[parent].token_ids[way]
            children.append(
                _Child(rows[parent], token_id, ways.log_probabilities[way], ways.alternatives, index)
            )
    return children


def _end(child: _Child, eos_id: int) -> FinishReason | None:
    """Returns why a token completes its hypothesis; None where it does not."""
    if child.token_id == eos_id:
        return FinishReason.EOS
    tail = _advanced(child.parent, child.token_id)
    if tail is None:
        return FinishReason.STOP
    child.tail = tail
    return None


def _advanced(sequence: Sequence, token_id: int) -> bytes | None:
    """Returns a row's tail after one more token; None where that completes a stop sequence."""
    stops = sequence.request.stops
    return sequence.tail if stops is None else stops.advance(sequence.tail, token_id)


def _place(search: Search, children: list[_Child]) -> list[Fork]:
    """Give each child a row.

    The first child of a parent takes its row. Others take rows of parents without children, or new ones.
    """
    by_parent: dict[Sequence, list[_Child]] = {}
    for child in children:
        by_parent.setdefault(child.parent, []).append(child)
    spare = [row for row in search.rows if row not in by_parent]
    forks: list[Fork] = []
    rows: dict[_Child, Sequence] = {}
    for parent, (first, *others) in by_parent.items():
        for child in others:
            if not spare:
                row, num_shared = _new_row(parent), 0
            else:
                row = spare.pop()
                num_shared = 1 + _num_shared(row.token_ids, parent.token_ids)  # 1: the start token
            row.token_ids = parent.token_ids.copy()
            row.choices = parent.choices.copy()
            row.log_probability = parent.log_probability
            rows[child] = row
            forks.append(Fork(parent, row, num_shared))
        rows[first] = parent
    for child, row in rows.items():
        row.index = 0 if search.request.beam else child.index
        row.token_ids.append(child.token_id)
        row.next_token_id = child.token_id
        row.tail = child.tail
        row.log_probability += child.log_probability
        if search.request.is_detailed:
            row.choices.append(Choice(child.log_probability, child.alternatives))
    search.rows = [rows[child] for child in children]
    return forks


def _new_row(parent: Sequence) -> Sequence:
    return Sequence(
        parent.search,
        next_token_id=parent.next_token_id,
        source_length=parent.source_length,
        num_branches=parent.num_branches,
        is_plain=parent.is_plain,
    )


def _ended(child: _Child, reason: FinishReason, penalty: float = 1.0) -> Hypothesis:
    """Returns the hypothesis that its last token has completed."""
    parent, is_eos = child.parent, reason is FinishReason.EOS
    return Hypothesis(
        token_ids=(*parent.token_ids, *(() if is_eos else (child.token_id,))),
        finish_reason=reason,
        score=child.total / penalty,
        choices=(*parent.choices, Choice(child.log_probability, child.alternatives))
        if parent.request.is_detailed
        else (),
    )


def _as_it_is(sequence: Sequence, reason: FinishReason) -> Hypothesis:
    return Hypothesis(tuple(sequence.token_ids), reason, sequence.log_probability, tuple(sequence.choices))


def _num_shared(one: list[int], other: list[int]) -> int:
    """Returns the length of the longest common beginning of two targets."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        length = (least + most + 1) // 2
        if one[least:length] == other[least:length]:
            least = length
        else:
            most = length - 1
    return least
