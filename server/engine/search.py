"""Extends the hypotheses of a request by the tokens that a step selected; uses records only, no tensors.

`training.evaluation.search` implements the same search independently, and tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from seq2seq_serve.bundle.manifest import LengthPenalty
from seq2seq_serve.server.engine.plan import Branches, Candidates
from seq2seq_serve.server.engine.request import Array, Beam, Request
from seq2seq_serve.server.engine.result import Alternatives, FinishReason, Hypothesis, TokenScore
from seq2seq_serve.server.engine.state import Search, Sequence
from seq2seq_serve.server.errors import NO_NUMBERS, EngineFailed


class Fork(NamedTuple):
    """A row, `child`, whose next step continues from the cache of the row `parent`.

    The scheduler copies the cache. A child without a slot first gets one, with a copy of the memory if the
    runner does not share it.

    Attributes:
        num_shared: Number of first positions in which the two caches are equal already.
    """

    parent: Sequence
    child: Sequence
    num_shared: int


class Ranked(NamedTuple):
    """The best extensions of a request's hypotheses by one token, best first; impossible ones come last.

    Those of a beam with terms are as many as its banks choose, and each of them ends or goes on.

    Attributes:
        parents: The index of each one's hypothesis among the search's rows.
        token_ids: The tokens.
        log_probabilities: The log-probability of each token.
        totals: The log-probability of each extended hypothesis; minus infinity or NaN if it is impossible.
        alternatives: By row, the most probable tokens, if the request wants them.
    """

    parents: list[int]
    token_ids: list[int]
    log_probabilities: list[float]
    totals: list[float]
    alternatives: list[Alternatives]

    def token_score(self, place: int) -> TokenScore:
        """Returns the details of the token of one of them."""
        alternatives = self.alternatives[self.parents[place]] if self.alternatives else ()
        return TokenScore(self.log_probabilities[place], alternatives)


def start(
    request: Request, start_ids: tuple[int, ...], eos_ids: Collection[int], *, feeds_prefix: bool = False
) -> Search:
    """Creates the search of a new request, with one row, whose memory the encoder will fill.

    Args:
        request: The new request.
        start_ids: The model's start tokens, if the request does not have its own.
        eos_ids: The tokens that end a sequence.
        feeds_prefix: Whether steps read the prefix, one token each; otherwise the row begins after it.
    """
    num_known = request.start_ids.index(None) if None in request.start_ids else len(request.start_ids)
    known_ids = cast(tuple[int, ...], request.start_ids[:num_known])
    search = Search(request, known_ids or start_ids)
    root = Sequence(search, next_token_id=search.start_ids[-1])
    if len(known_ids) < len(request.start_ids):
        root.detects = True
        root.num_forced = len(request.start_ids) - len(known_ids) - 1 + len(request.prefix_ids)
    elif feeds_prefix:
        root.num_forced = len(request.prefix_ids)
    else:
        root.token_ids = list(request.prefix_ids)
        root.next_token_id = (*search.start_ids, *request.prefix_ids)[-1]
    _prepare(root, eos_ids, scores=feeds_prefix and request.is_score)
    search.rows.append(root)
    return search


def _prepare(root: Sequence, eos_ids: Collection[int], *, scores: bool = False) -> None:
    """Set the number of tokens that the next step selects for a request's first row."""
    request = root.request
    if scores or root.detects:
        root.num_branches, root.is_plain = 1, False
    elif root.num_forced:
        root.num_branches, root.is_plain = 1, True
    else:
        beam = request.beam
        root.num_branches = request.num_hypotheses if beam is None else num_candidates(beam, eos_ids)
        root.is_plain = request.is_plain and not request.begin_suppressed_ids
        root.progress = None if request.terms is None else request.terms.after(root.token_ids)


def add_choice(sequence: Sequence, branches: Branches) -> None:
    """Add the log-probability of a row's next token, and its alternatives if the request wants them.

    Raises:
        EngineFailed: The log-probability is NaN.
    """
    (log_probability,) = (0.0,) if _is_end_forced(sequence) else branches.log_probabilities
    if math.isnan(log_probability):
        raise EngineFailed(NO_NUMBERS)
    if sequence.detects:
        return
    if sequence.request.is_score:
        sequence.token_scores.append(TokenScore(log_probability))
        return
    sequence.log_probability += log_probability
    if sequence.request.is_detailed:
        sequence.token_scores.append(TokenScore(log_probability, branches.alternatives))


def extend(sequence: Sequence, token_id: int, eos_ids: Collection[int]) -> bool:
    """Append a token to a row. Returns whether its hypothesis is complete; the search has then dropped it.

    Raises:
        EngineFailed: Some scores of a given target are NaN.
    """
    search = sequence.search
    request = search.request
    reason: FinishReason | None = None
    if sequence.num_forced or sequence.detects:
        read_id = token_id if sequence.detects else sequence.forced_id
        assert read_id is not None
        if sequence.detects or sequence.num_forced > len(request.prefix_ids):
            search.start_ids = (*search.start_ids, read_id)
        else:
            sequence.token_ids.append(read_id)
        sequence.next_token_id = read_id
        sequence.num_forced -= not sequence.detects
        sequence.detects = False
        _prepare(sequence, eos_ids, scores=request.is_score)
        return False
    if request.is_score and any(math.isnan(each.log_probability) for each in sequence.token_scores):
        raise EngineFailed(NO_NUMBERS)
    # A scored target is complete before this; a step at most computed the log-probability of its end.
    if token_id in eos_ids or request.is_score or _is_end_forced(sequence):
        reason = FinishReason.EOS
    else:
        sequence.token_ids.append(token_id)
        sequence.next_token_id = token_id
        sequence.is_plain = request.is_plain
        tail = sequence.tail if request.stops is None else request.stops.advance(sequence.tail, token_id)
        num_left = request.max_new_tokens - sequence.num_generated
        if tail is None:
            reason = FinishReason.STOP
        elif num_left <= 0:
            reason = FinishReason.LENGTH
        else:
            sequence.tail = tail
            is_appended = request.is_plain and request.stops is None and not request.attention
            sequence.num_simple = num_left - 1 if is_appended else 0
            return False
    sequence.num_simple = 0
    search.rows.remove(sequence)
    search.ended[sequence.index] = _as_it_is(sequence, reason)
    return True


def rank(
    searches: Iterable[Search], tables: Iterable[Candidates], eos_ids: Collection[int]
) -> dict[Search, Ranked]:
    """Rank the extensions of many beams at once: `num_candidates` of each, or those that its terms choose.

    Equal extensions are ordered by their parents' rank, then by the lower id.
    """
    beams = [search for search in searches if search.request.beam is not None]
    ranked: dict[Search, Ranked] = {}
    for table in tables:
        alike: dict[tuple[int, int, bool], list[Search]] = {}
        for search in beams:
            first = search.rows[0]
            if first.row in table.places:
                key = len(search.rows), first.num_branches, first.progress is None
                alike.setdefault(key, []).append(search)
        for (num_rows, number, is_free), group in alike.items():
            rows = [row for search in group for row in search.rows]
            at = [table.places[row.row] for row in rows if row.row is not None]
            token_ids, log_probabilities = table.token_ids[at, :number], table.log_probabilities[at, :number]
            extensions = None
            if not is_free:
                extensions = _with_wanted(rows, token_ids, log_probabilities, _wanted_of(table, at), eos_ids)
                token_ids, log_probabilities, number = *extensions[:2], extensions[0].size
            width = token_ids.shape[1]  # a small vocabulary has fewer candidates
            before = np.array([row.log_probability for row in rows])
            sums = (before[:, None] + log_probabilities).reshape(len(group), -1)  # (R, B*width)
            order = np.argsort(-sums, axis=1, kind="stable")[:, :number]
            best = order + np.arange(0, sums.size, sums.shape[1])[:, None]
            ends = list[int]()
            if extensions is not None:
                is_chosen = _chosen(group, extensions, sums, best, eos_ids)
                best, ends = best[is_chosen], is_chosen.sum(axis=1).cumsum().tolist()
            found = (
                best // width % num_rows,
                token_ids.take(best),
                log_probabilities.take(best),
                sums.take(best),
            )
            columns = [_split(each.tolist(), ends) if ends else each.tolist() for each in found]
            for search, parents, tokens, scores, totals in zip(group, *columns, strict=True):
                ranked[search] = Ranked(parents, tokens, scores, totals, _alternatives_of(search, table))
    return ranked


def _split(values: list[Any], ends: list[int]) -> list[list[Any]]:
    return [values[begin:end] for begin, end in pairwise([0, *ends])]


class _Extensions(NamedTuple):
    """Tokens that may extend some rows whose targets must have terms, `(m, K + W)`.

    Each row has its candidates first, then the tokens that its terms want.

    Attributes:
        token_ids: The tokens.
        log_probabilities: Theirs; minus infinity where there is none.
        num_left: The fewest tokens that each one needs after its own for all terms, or an end of sequence in
            its place.
        spoiling: The places of those that spoil an exact term, among all of them.
    """

    token_ids: Array
    log_probabilities: Array
    num_left: Array
    spoiling: list[int]


class _Wanted(NamedTuple):
    """The tokens `(p,)` that the terms of some rows want, one row after the other.

    Attributes:
        rows: The row of each one.
        numbers: Its number among those of its row.
        token_ids: The tokens.
        log_probabilities: Theirs.
        num_left: The fewest tokens that each one needs after its own for all terms.
    """

    rows: Array
    numbers: Array
    token_ids: Array
    log_probabilities: Array
    num_left: Array


def _wanted_of(table: Candidates, at: list[int]) -> _Wanted:
    """Returns the tokens that are wanted at some places of a table."""
    (places, token_ids), num_left = table.wanted.places.T, table.wanted.num_left
    row_at = np.full(len(table.token_ids), -1)
    row_at[at] = np.arange(len(at))
    rows, numbers = row_at[places], np.arange(len(places)) - np.searchsorted(places, places)
    wanted = _Wanted(rows, numbers, token_ids, table.found, num_left)
    return wanted if len(at) == len(row_at) else _Wanted(*(values[rows >= 0] for values in wanted))


def _with_wanted(
    rows: list[Sequence],
    token_ids: Array,
    log_probabilities: Array,
    wanted: _Wanted,
    eos_ids: Collection[int],
) -> _Extensions:
    """Adds the wanted tokens to the candidates of some rows, `(m, K)` each."""
    num_rows, K = token_ids.shape
    width = K + int(wanted.numbers.max(initial=-1)) + 1
    all_ids, num_left = np.zeros((num_rows, width), np.int64), np.empty((num_rows, width), np.int64)
    scores = np.full((num_rows, width), -math.inf, log_probabilities.dtype)
    all_ids[:, :K], scores[:, :K] = token_ids, log_probabilities
    # A wanted token that is a candidate counts once, and keeps the place of the candidate.
    each, candidates = np.nonzero(token_ids[wanted.rows] == wanted.token_ids[:, None])
    own = wanted.rows * width + (K + wanted.numbers)
    all_ids.reshape(-1)[own] = wanted.token_ids
    scores.reshape(-1)[own] = wanted.log_probabilities
    scores.reshape(-1)[own[each]] = -math.inf
    # After a row without a begun term, only tokens of terms change what is missing.
    begun, lefts, left_now, spoiling = list[int](), list[list[int]](), list[int](), list[int]()
    for row, sequence in enumerate(rows):
        terms, progress = sequence.request.terms, sequence.progress
        assert terms is not None
        assert progress is not None
        left_now.append(progress.num_left)
        if progress.begun.length:
            ids = token_ids[row].tolist()
            left = terms.left_after(progress, ids)
            for eos_id in eos_ids:
                if eos_id in ids:
                    left[ids.index(eos_id)] = progress.num_left
            begun.append(row)
            lefts.append(left)
        if terms.has_exact:
            places = terms.spoiling(progress, sequence.token_ids, all_ids[row].tolist)
            spoiling += [row * width + place for place in places]
    num_left[:] = np.array(left_now)[:, None]
    num_left.reshape(-1)[own] = wanted.num_left
    num_left[wanted.rows[each], candidates] = wanted.num_left[each]
    if begun:
        num_left[begun, :K] = lefts
    return _Extensions(all_ids, scores, num_left, spoiling)


def _chosen(
    searches: list[Search], extensions: _Extensions, sums: Array, best: Array, eos_ids: Collection[int]
) -> Array:
    """Returns whether beams with terms keep their extensions, `(R, N)`, by what they have of the terms.

    An extension is in the bank of the number of tokens that it still needs, and each bank has a share of the
    places. An extension that ends is kept if its bank's share has it, and if it has all terms or is at the
    limit. One that could not have all terms at the limit is dropped, unless all would be. One that
    spoils an exact term is kept only if there is no other, and no complete hypothesis.

    Args:
        searches: The beams, all of one size.
        extensions: Those of all their rows.
        sums: The log-probability of each extended hypothesis, `(R, N)`.
        best: The places of a beam's extensions among all, `(R, N)`, the best first.
        eos_ids: The tokens that end a sequence.
    """
    token_ids, num_left = extensions.token_ids.reshape(sums.shape), extensions.num_left.reshape(sums.shape)
    is_possible = sums > -math.inf  # NaN is not
    is_end = np.logical_or.reduce([token_ids == eos_id for eos_id in eos_ids])
    is_spoiled = None
    if extensions.spoiling:
        is_spoiled = np.zeros(sums.shape, bool)
        is_spoiled.reshape(-1)[extensions.spoiling] = True
        is_spoiled &= ~is_end
    for number, search in enumerate(searches):
        if search.request.stops is not None:
            may_stop = is_possible[number] & ~is_end[number]
            if is_spoiled is not None:
                may_stop &= ~is_spoiled[number]
            for place in np.flatnonzero(may_stop).tolist():
                row = search.rows[place // extensions.token_ids.shape[1]]
                is_end[number, place] = _end(row, int(token_ids[number, place]), eos_ids) is not None
    num_after = np.array([_num_after(search) for search in searches])[:, None]
    may = is_possible & (num_left <= np.where(is_end, 0, num_after))
    if is_spoiled is not None:
        may &= ~is_spoiled
    if not may.any(axis=1).all():
        may = _possible(searches, is_possible, is_end, is_spoiled, num_left, num_after)
    beam = searches[0].request.beam
    assert beam is not None
    may, is_end, num_left = may.take(best), is_end.take(best), num_left.take(best)
    going = may & ~is_end
    if (going == may).all():
        return shared(may, num_left, beam.size)
    both = np.concatenate((may, going)), np.concatenate((num_left, num_left))
    has_place, goes_on = shared(*both, beam.size).reshape(2, *may.shape)
    chosen: Array = (has_place & is_end) | goes_on
    return chosen


def _possible(
    searches: list[Search],
    is_possible: Array,
    is_end: Array,
    is_spoiled: Array | None,
    num_left: Array,
    num_after: Array,
) -> Array:
    """Returns which extensions may have a place, `(R, N)`, where some beam has none that is right."""
    is_incomplete = is_end & (num_left > 0) & (num_after > 0)
    may = is_possible & ~is_incomplete
    if is_spoiled is not None:
        may &= ~is_spoiled
    for number in np.flatnonzero(~may.any(axis=1)).tolist():
        if not searches[number].ended:
            incomplete = is_possible[number] & is_incomplete[number]
            may[number] = incomplete if incomplete.any() else is_possible[number]
    in_time = may & (num_left <= num_after)
    kept: Array = np.where(in_time.any(axis=1, keepdims=True), in_time, may)
    return kept


def shared(may_have: Array, banks: Array, size: int) -> Array:
    """Divides the places of beams among banks, by the number of tokens that their hypotheses still need.

    The banks get places in turn, those that need the fewest tokens first, as long as they have hypotheses. So
    each gets the same number, and the places that one does not need go to the others (Post & Vilar 2018,
    section 3.3).

    Args:
        may_have: Whether a hypothesis may have a place, `(R, N)`: those of R beams, the best first.
        banks: The bank of each hypothesis.
        size: The number of places of each beam.

    Returns:
        Whether each hypothesis has a place.
    """
    num_beams, number = may_have.shape
    numbers, begins = np.arange(number), number * np.arange(num_beams)[:, None]
    no_bank = int(banks.max(initial=0)) + 1
    # The sort of small types takes time in proportion to their number.
    given = np.where(may_have, banks, no_bank).astype(np.min_scalar_type(no_bank))
    by_bank = np.argsort(given, axis=1, kind="stable") + begins
    in_order = given.take(by_bank)
    is_first = np.ones(may_have.shape, bool)
    is_first[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    rounds = numbers - np.maximum.accumulate(np.where(is_first, numbers, 0), axis=1)
    turns = np.where(in_order == no_bank, number, rounds) * no_bank + in_order
    first = np.argpartition(turns, min(size, number) - 1, axis=1)[:, :size]
    chosen = by_bank.take(first + begins)
    has_place = np.zeros(may_have.shape, bool)
    has_place.reshape(-1)[chosen] = True
    return has_place & may_have


def _num_after(search: Search) -> int:
    """Returns the most tokens of a target after its next one."""
    request = search.request
    return max(request.max_new_tokens - search.rows[0].num_generated - 1 - request.ends_forced, 0)


def branch(search: Search, branches: Branches, eos_ids: Collection[int]) -> list[Fork]:
    """Continue the only row of a request with several tokens; `extend_beam` does it for a beam."""
    (root,) = search.rows
    token_ids, log_probabilities, alternatives = (
        branches.token_ids,
        branches.log_probabilities,
        branches.alternatives,
    )
    if _is_end_forced(root):
        token_ids, log_probabilities, alternatives = [next(iter(eos_ids))], [0.0], ()
    totals = [root.log_probability + log_probability for log_probability in log_probabilities]
    extensions = Ranked([0] * len(totals), token_ids, log_probabilities, totals, [alternatives])
    is_last = root.num_generated + 1 >= search.request.max_new_tokens
    going: list[int] = []
    for place, (token_id, total) in enumerate(zip(token_ids, totals, strict=True)):
        if not total > -math.inf:
            continue
        reason = _end(root, token_id, eos_ids) or (FinishReason.LENGTH if is_last else None)
        if reason is None:
            going.append(place)
        else:
            search.ended[place] = _ended(search, extensions, place, reason)
    forks = _place(search, extensions, going)
    for place, row in zip(going, search.rows, strict=True):
        row.index = place
        row.num_branches = 1
    return forks


def abandon(search: Search, reason: FinishReason) -> None:
    """End a request with incomplete hypotheses."""
    if search.request.beam is not None:
        search.ended.clear()
        del search.rows[1:]
    for row in search.rows:
        search.ended[row.index] = _as_it_is(row, reason)
    search.rows.clear()


def unsent_tokens(search: Search) -> dict[int, list[int]]:
    """Returns the tokens to stream now, by hypothesis, and counts them as sent.

    A beam sends the tokens that all of its hypotheses share, so that it never revokes one.
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
        new = token_ids[search.num_sent.get(index, 0) :]
        if new:
            search.num_sent[index] = len(token_ids)
            news[index] = new
    return news


def length_penalty(num_tokens: int, alpha: float, formula: LengthPenalty) -> float:
    """Returns the divisor of a hypothesis' log-probability.

    It is `((5 + |Y|) / 6)^alpha` for "wu" (Wu et al. 2016, equation 14, arXiv:1609.08144), and `|Y|^alpha`
    for "power". |Y| is `num_tokens`: the generated tokens with the end of sequence, without a prefix.
    """
    return float((num_tokens if formula == "power" else (5 + num_tokens) / 6) ** alpha)


def extend_beam(search: Search, ranked: Ranked, eos_ids: Collection[int]) -> list[Fork]:
    """Extend the rows of a beam together by their best extensions.

    A complete hypothesis is kept in `search.ended` if it is among the first `size` extensions. The first
    `size` incomplete ones go on.

    Returns:
        The rows that continue from the cache of another row. `search.rows` contains no row that has ended;
        it is empty if the search is over.
    """
    request, rows = search.request, search.rows
    beam, num_tokens = request.beam, rows[0].num_generated + 1
    assert beam is not None
    if _is_end_forced(rows[0]):
        lacking = [row.progress.num_left if row.progress is not None else 0 for row in rows]
        lasts = [parent for parent, number in enumerate(lacking) if not number or all(lacking)]
        totals = [rows[parent].log_probability for parent in lasts]
        ranked = Ranked(lasts, [next(iter(eos_ids))] * len(lasts), [0.0] * len(lasts), totals, [])

    def penalty(number: int) -> float:
        return length_penalty(number + request.num_counted, beam.alpha, beam.formula)

    ended, going = list(search.ended.values()), list[int]()  # the best first
    for place, token_id in enumerate(ranked.token_ids):
        if not ranked.totals[place] > -math.inf:
            break
        may_end = token_id in eos_ids or request.stops is not None
        reason = _end(rows[ranked.parents[place]], token_id, eos_ids) if may_end else None
        if reason is None:
            going.append(place)
            if len(going) == beam.size and request.terms is None:
                break  # later ones are not among the first `size` extensions
        elif place < beam.size or request.terms is not None:
            ended.append(_ended(search, ranked, place, reason, penalty(num_tokens)))
    if len(ended) > len(search.ended):
        ended = _best(ended, beam.size)
    # The banks of a beam with terms complete hypotheses one after the other: those of the result are enough.
    num_needed = beam.size if request.terms is None else request.num_hypotheses
    if going and len(ended) >= num_needed:
        # Further tokens have log-probabilities of at most 0, so only the penalty can raise a score: with a
        # positive alpha most at the limit. At the limit all hypotheses end.
        is_exact = beam.early_stopping == "never" and beam.alpha > 0
        bound = ranked.totals[going[0]] / penalty(request.max_new_tokens if is_exact else num_tokens)
        is_full = len(ended) == beam.size
        if (is_full and beam.early_stopping is True) or bound <= ended[num_needed - 1].score:
            going = []
    if num_tokens == request.max_new_tokens:
        length, divisor = FinishReason.LENGTH, penalty(num_tokens)
        ended += [_ended(search, ranked, place, length, divisor) for place in going]
        ended, going = _best(ended, beam.size), []
    if not going:
        del ended[request.num_hypotheses :]
    search.ended = dict(enumerate(ended))
    return _place(search, ranked, going)


def num_candidates(beam: Beam, eos_ids: Collection[int]) -> int:
    """Returns the number of extensions that are ranked: enough that `size` of them do not end."""
    return max(2, 1 + len(eos_ids)) * beam.size


def _is_end_forced(sequence: Sequence) -> bool:
    """Returns whether the next token of a row is the end of sequence, whatever the model says."""
    request = sequence.request
    return request.ends_forced and sequence.num_generated == request.max_new_tokens - 1


def _best(hypotheses: list[Hypothesis], number: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: (sum(hypothesis.missing), -hypothesis.score))[:number]


def _alternatives_of(search: Search, table: Candidates) -> list[Alternatives]:
    """Returns the most probable tokens of each row, if the request wants them."""
    wanted = search.request.num_alternatives
    return [_alternatives(row, table, wanted) for row in search.rows] if wanted else []


def _alternatives(row: Sequence, table: Candidates, number: int) -> Alternatives:
    """Returns the most probable tokens of a row with their log-probabilities."""
    assert row.row is not None
    place = table.places[row.row]
    token_ids, log_probabilities = (
        values[place, :number].tolist() for values in (table.token_ids, table.log_probabilities)
    )
    return tuple(zip(token_ids, log_probabilities, strict=True))


def _end(row: Sequence, token_id: int, eos_ids: Collection[int]) -> FinishReason | None:
    """Returns why a token completes the hypothesis of a row; None if it does not."""
    if token_id in eos_ids:
        return FinishReason.EOS
    stops = row.search.request.stops
    if stops is None or stops.advance(row.tail, token_id) is not None:
        return None
    return FinishReason.STOP


def _place(search: Search, ranked: Ranked, going: list[int]) -> list[Fork]:
    """Give each extension that goes on a row, the best first.

    The first child of a parent takes its row. Further children take rows of parents without children, or new
    rows.
    """
    request, before = search.request, search.rows
    parents, token_ids, totals = ranked.parents, ranked.token_ids, ranked.totals
    unclaimed = {parents[place] for place in going}
    spare = [row for index, row in enumerate(before) if index not in unclaimed]
    forks: list[Fork] = []
    rows: list[Sequence] = []
    for place in going:
        index = parents[place]
        parent = before[index]
        if index in unclaimed:
            unclaimed.remove(index)
            rows.append(parent)
            continue
        if not spare:
            row, num_shared = _new_row(parent), 0
        else:
            row = spare.pop()
            num_shared = len(search.start_ids) + _num_shared(row.token_ids, parent.token_ids)
        row.token_ids = parent.token_ids.copy()
        row.tail, row.progress = parent.tail, parent.progress
        if parent.token_scores:
            row.token_scores = parent.token_scores.copy()
        if parent.attended:
            row.attended = parent.attended.copy()
        rows.append(row)
        forks.append(Fork(parent, row, num_shared))
    for row, place in zip(rows, going, strict=True):
        token_id = token_ids[place]
        if request.terms is not None:
            assert row.progress is not None
            row.progress = request.terms.advance(row.progress, token_id)
        row.token_ids.append(token_id)
        row.next_token_id = token_id
        row.log_probability = totals[place]
        if request.stops is not None:
            tail = request.stops.advance(row.tail, token_id)
            assert tail is not None  # it would have ended the hypothesis
            row.tail = tail
        if request.is_detailed:
            row.token_scores.append(ranked.token_score(place))
    search.rows = rows
    return forks


def _new_row(parent: Sequence) -> Sequence:
    return Sequence(
        parent.search,
        next_token_id=parent.next_token_id,
        num_branches=parent.num_branches,
        is_plain=parent.is_plain,
    )


def _ended(
    search: Search, ranked: Ranked, place: int, reason: FinishReason, penalty: float = 1.0
) -> Hypothesis:
    """Returns the hypothesis of an extension whose token completed it."""
    parent, token_id = search.rows[ranked.parents[place]], ranked.token_ids[place]
    last_ids = () if reason is FinishReason.EOS else (token_id,)
    return Hypothesis(
        token_ids=(*parent.token_ids, *last_ids),
        finish_reason=reason,
        attended=parent.attended.copy(),
        score=ranked.totals[place] / penalty,
        token_scores=(*parent.token_scores, ranked.token_score(place)) if search.request.is_detailed else (),
        missing=() if parent.progress is None else _missing(parent, last_ids),
    )


def _missing(row: Sequence, last_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns how often a row that ends with some tokens lacks each required term; nothing if it has all."""
    terms, progress = row.request.terms, row.progress
    assert terms is not None
    assert progress is not None
    for token_id in last_ids:
        progress = terms.advance(progress, token_id)
    return progress.at_end if any(progress.at_end) else ()


def _as_it_is(sequence: Sequence, reason: FinishReason) -> Hypothesis:
    return Hypothesis(
        tuple(sequence.token_ids),
        reason,
        sequence.attended,
        sequence.log_probability,
        tuple(sequence.token_scores),
    )


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
