"""The way out of an engine's thread: its turns become news in the mailboxes of the waiting handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from server.engine import Engine
from server.errors import ServerError
from server.metrics import Metrics
from server.records import Request, Result, Turn
from server.statistics import Statistics


class Mailbox:
    """What the engine has said of one request and its handler has not read yet.

    Owned by `Deliveries`; used on the event loop only. Tokens pile up while the handler is busy sending,
    so that a slow client gets fewer and larger pieces.
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
        """Add news, new tokens by their hypothesis, and wake the reader."""
        for place, new in token_ids.items():
            self._token_ids.setdefault(place, []).extend(new)
        self._result = self._result or result
        self._news.set()

    async def take(self) -> tuple[dict[int, list[int]], Result | None]:
        """Wait for news and empty the box: new tokens by hypothesis, and the result when there is one."""
        await self._news.wait()
        self._news.clear()
        token_ids, self._token_ids = self._token_ids, {}
        return token_ids, self._result

    async def wait_for_result(self) -> Result:
        """Wait for the end, if it has not come yet."""
        while self._result is None:
            await self.take()
        return self._result


class Deliveries:
    """The mailboxes of the requests of one model's engines.

    Owned by the app, one for each loaded model. Everything but `deliver` belongs to the event loop.

    Args:
        model_name: What the engine's model is called.
        loop: The event loop that the handlers run on.
        metrics: Is told of every turn.

    Attributes:
        statistics: Of all turns so far.
    """

    def __init__(self, model_name: str, loop: asyncio.AbstractEventLoop, metrics: Metrics) -> None:
        self.model_name = model_name
        self._loop = loop
        self._metrics = metrics
        self.statistics = Statistics()
        self._mailboxes: dict[Request, Mailbox] = {}

    def deliver(self, turn: Turn) -> None:
        """Called on the engine's thread, once a turn."""
        self._loop.call_soon_threadsafe(self._dispatch, turn)

    @contextmanager
    def submitted(
        self, engine: Engine, requests: Sequence[Request], is_expired: Callable[[], bool]
    ) -> Iterator[dict[Request, Mailbox]]:
        """Give requests to an engine, all or none, and take back those that have not ended with the block.

        `is_expired` says then whether that is because the deadline passed.

        Raises:
            ServerError: The engine refuses them.
        """
        mailboxes = {request: Mailbox() for request in requests}
        self._mailboxes |= mailboxes
        try:
            try:
                engine.submit(*requests)
            except ServerError:
                self.statistics.failed.count += len(requests)
                raise
            try:
                yield mailboxes
            finally:
                for request, mailbox in mailboxes.items():
                    if not mailbox.has_result:
                        engine.cancel(request, is_expired=is_expired())
        finally:
            for request in requests:
                del self._mailboxes[request]

    def _dispatch(self, turn: Turn) -> None:
        for update in turn.updates:
            mailbox = self._mailboxes.get(update.request)
            if mailbox is not None:  # else its handler left, and the engine has not heard of it yet
                mailbox.put(update.token_ids, update.result)
        self._metrics.record_turn(self.model_name, turn.stats)
        self.statistics.record_turn(turn.stats)
