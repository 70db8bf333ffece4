"""Keeps asyncio from logging the exceptions of futures that are not awaited any more."""

from __future__ import annotations

import asyncio
from typing import Any


def retrieve(future: asyncio.Future[Any]) -> None:
    """Read a future's exception; a done callback for futures whose waiter may be cancelled first."""
    if not future.cancelled():
        future.exception()
