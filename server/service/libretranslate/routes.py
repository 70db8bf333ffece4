"""Chooses what translates each text of a request, by its language, which may have to be detected."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from seq2seq_serve.protos.languages import is_same_language, name_of
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.libretranslate.fields import AUTO, Fields
from seq2seq_serve.server.service.libretranslate.languages import (
    LATE_BYTES,
    Detected,
    Route,
    best_of,
    find_route,
    is_clear,
    is_unchanged,
    no_route,
    rank,
)
from seq2seq_serve.server.service.libretranslate.texts import Text


async def choose_routes(texts: Sequence[Text], fields: Fields, call: RemoteCall) -> None:
    """Decides which model translates each text, or that it stays as it is.

    Raises:
        InvalidRequest: No model has the two languages, or the language of no text is detected.
    """
    models, source, target = call.calls.models.open_to(call.caller), fields.source, fields.target
    if not target:
        raise InvalidRequest("target is missing: name a language", field="target")
    worded = [text for text in texts if text.has_words]
    if source == AUTO:
        num_bytes = LATE_BYTES + sum(len(text.beginning) for text in worded)
        await call.read(partial(_choose_by_detection, worded, target, models), num_bytes)
        return
    route = find_route(source, target, models)
    if route is None and not is_unchanged(source, target, models):
        raise await call.read(lambda _: no_route(source, target, models), LATE_BYTES)
    for text in worded:
        text.route = route


def _choose_by_detection(
    texts: Sequence[Text], target: str, models: Sequence[ServedModel], checkpoint: YieldPoint
) -> None:
    """Chooses the routes of texts by their languages.

    A text whose language is not clear is read in that of all texts together. One in the language of the
    target, or in a language that no model reads, stays as it is.
    """
    routes: dict[str, Route | None] = {}

    def route_of(code: str) -> Route | None:
        if code not in routes:
            same = is_same_language(code, target)
            routes[code] = None if same else find_route(code, target, models)
        return routes[code]

    def is_known(code: str) -> bool:
        return route_of(code) is not None or is_same_language(code, target)

    rankings = []
    for text in texts:
        checkpoint()
        rankings.append(rank(text.beginning))
    whole = best_of(rank(" ".join(text.beginning for text in texts)), is_known) if len(texts) > 1 else None
    num_known = 0
    for text, ranking in zip(texts, rankings, strict=True):
        best = best_of(ranking, is_known) or (None if is_clear(ranking) else whole)
        text.detected = best or ranking[0]
        text.route = None if best is None else route_of(best.code)
        num_known += best is not None
    if texts and not num_known:
        raise _undetected(rankings[0], target, models)


def _undetected(ranking: Sequence[Detected], target: str, models: Sequence[ServedModel]) -> InvalidRequest:
    best = ranking[0]
    if is_clear(ranking):
        return no_route(best.code, target, models)
    return InvalidRequest(
        f"the language of the text is not clear: {name_of(best.code)} has a probability of "
        f"{best.probability:.0%}: name the source",
        field="source",
    )
