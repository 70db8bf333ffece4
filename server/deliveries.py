"""Carries the turns of the engines to the event loop, into the mailboxes of the waiting handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from seq2seq_serve.server.engine.records import Request, Result, Turn
from seq2seq_serve.server.errors import ServerError
from seq2seq_serve.server.metrics import Metrics
from seq2seq_serve.server.statistics import Statistics


class Mailbox:
    """The engine's updates of one request that its handler has not read yet.

    Owned by `Deliveries`; used on the event loop only. Tokens are collected while the handler is sending, so
    that a slow client gets fewer and larger pieces.
    """

    def __init__(self) -> None:
        self._token_ids: dict[int, list[int]] = {}
        self._result: Result | None = None
        self._news = asyncio.Event()

    @property
    def has_result(self) -> bool:
        """Whether the engine has ended the request."""
        return self._result is not None

    def put(self, token_ids: Mapping[int, list[int]], result: Result | None) -> None:
        """Add new tokens, by their hypothesis, or the result, and wake the reader."""
        for place, new in token_ids.items():
            self._token_ids.setdefault(place, []).extend(new)
        self._result = self._result or result
        self._news.set()

    async def take(self) -> tuple[dict[int, list[int]], Result | None]:
        """Wait for updates and take them: new tokens by hypothesis, and the result once it exists."""
        await self._news.wait()
        self._news.clear()
        token_ids, self._token_ids = self._token_ids, {}
        return token_ids, self._result

    async def wait_for_result(self) -> Result:
        """Wait until the request has ended."""
        while self._result is None:
            await self.take()
        return self._result


class Deliveries:
    """The mailboxes of the requests of one model's engines.

    Owned by the app, one for each loaded model. Everything but `deliver` and `refuse` belongs to the event
    loop.

    Args:
        model_name: The name of the engines' model.
        loop: The event loop of the handlers.
        metrics: Records every turn.

    Attributes:
        mailboxes: By request, from its submission until its handler ends.
        statistics: Sums over all turns so far.
    """

    def __init__(self, model_name: str, loop: asyncio.AbstractEventLoop, metrics: Metrics) -> None:
        self.model_name = model_name
        self._loop = loop
        self._metrics = metrics
        self.statistics = Statistics()
        self.mailboxes: dict[Request, Mailbox] = {}

    def deliver(self, turn: Turn) -> None:
        """Take a turn over from an engine's thread."""
        self._loop.call_soon_threadsafe(self._dispatch, turn)

    def refuse(self, requests: Sequence[Request], error: ServerError) -> None:
        """Take over from an engine's thread that the engine does not accept the requests."""
        self._loop.call_soon_threadsafe(self._dispatch_refusal, requests, error)

    def _dispatch(self, turn: Turn) -> None:
        for update in turn.updates:
            mailbox = self.mailboxes.get(update.request)
            if mailbox is not None:  # None: its handler has ended, and the engine has not cancelled it yet
                mailbox.put(update.token_ids, update.result)
        self._metrics.record_turn(self.model_name, turn)
        self.statistics.record_turn(turn)

    def _dispatch_refusal(self, requests: Sequence[Request], error: ServerError) -> None:
        self.statistics.failed.count += len(requests)
        for request in requests:
            if request in self.mailboxes:
                self.mailboxes[request].put({}, Result.failed(request, error))
