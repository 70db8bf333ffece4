"""Work on the threads of a pool, or on this one where the pool takes no more: while the interpreter ends.

After its main thread, a program's other threads go on, and may use a model; pools start nothing any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def in_thread(work: Callable[[], _Result]) -> _Result:
    """Returns the result of `work`, which runs on a thread of the event loop's pool."""
    try:
        running = asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError as error:
        _check_is_refused(error)
    else:
        return await running
    return work()


def on_all(pool: ThreadPoolExecutor, work: Callable[..., object], *columns: Iterable[Any]) -> None:
    """Calls `work` with the items at each place of the columns, side by side, and waits."""
    running = []
    for items in zip(*columns, strict=True):
        try:
            running.append(pool.submit(work, *items))
        except RuntimeError as error:
            _check_is_refused(error)
            work(*items)
    for one in running:
        one.result()


def _check_is_refused(error: RuntimeError) -> None:
    """Raises an error of a pool after which it may still do the work: where no thread can be started."""
    if "cannot schedule" not in str(error):
        raise error
