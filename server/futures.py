"""What asyncio leaves to those who wait for work that others may have given up."""

from __future__ import annotations

import asyncio
from typing import Any


def retrieve(future: asyncio.Future[Any]) -> None:
    """Take note of how a future ended: asyncio logs a traceback of each exception that nobody asked for.

    To be added as a callback where whoever waits may leave first, such as beside `asyncio.shield`.
    """
    if not future.cancelled():
        future.exception()
