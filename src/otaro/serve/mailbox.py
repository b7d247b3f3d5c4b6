"""From other threads to the event loop.

`call_soon_threadsafe` writes to a socket each time. A scheduler that makes thousands of tokens a second would fill it,
and what else goes through it, such as signals, would be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any


class Mailbox:
    """What other threads have for the event loop. However much there is, they wake it once."""

    def __init__(self) -> None:
        self._posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False
        self.loop: asyncio.AbstractEventLoop | None = None

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        self._posted.append((function, arguments))
        if not self._woken and self.loop is not None:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has been closed: the server is gone
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before anything is taken out: what comes from now on wakes it again
        while self._posted:
            function, arguments = self._posted.popleft()
            function(*arguments)
