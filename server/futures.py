"""Keeps asyncio from logging the exceptions of work that nobody waits for any more."""

from __future__ import annotations

import asyncio
from typing import Any


def retrieve(future: asyncio.Future[Any]) -> None:
    """Ask a future for its exception: a callback for where whoever waits may leave first."""
    if not future.cancelled():
        future.exception()
