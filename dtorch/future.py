"""`TensorFuture`: a value that is on its way from the devices.

In: a function that waits for the value. Out: `get`, `wait`, `wait_for`, `is_ready`, and `await`, which blocks no
event loop and does not poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any


class TensorFuture:
    """The value of a tensor, later. `pending` has `wait(timeout_s) -> bool`, `done` and `when_done(callback)`."""

    def __init__(self, pending: Any, fetch: Callable[[], Any]) -> None:
        self._pending, self._fetch = pending, fetch

    def get(self) -> Any:
        """Block until the value is there and return it as a torch tensor; raises what computing it raised."""
        self._pending.wait(None)
        return self._fetch()

    def wait(self) -> None:
        """Block until the value is there (or computing it has failed)."""
        self._pending.wait(None)

    def wait_for(self, timeout_ms: float) -> bool:
        """Block for at most `timeout_ms` milliseconds; whether the value is there."""
        return self._pending.wait(timeout_ms / 1e3)

    def is_ready(self) -> bool:
        """Whether `get` would return at once."""
        return self._pending.done

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def tell() -> None:
            with suppress(RuntimeError):  # the loop was closed by somebody who gave up
                loop.call_soon_threadsafe(wake)

        self._pending.when_done(tell)
        yield from waiter.__await__()
        return self._fetch()


class _Ready:
    """What a future waits for when the value is there already."""

    done = True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        callback()


READY = _Ready()
