"""The process: its log, its signals, its end.

At SIGTERM or Ctrl-C whoever waits or comes is turned away, and answers that are being written have some seconds to come
to their end; then they are ended. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from otaro.serve.service import Service

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MOMENT = 0.05
LAST_SECONDS = 5
"""How long the connections of answers that were ended have to be closed."""
HURRIED_SECONDS = 0.5
"""The same after a second signal."""
IDLE_SECONDS = 30
MOST_CONNECTIONS = 1000


def log_to_stderr() -> None:
    """Send the log to what is stderr now: whoever silences that for a moment does not silence the log."""
    stream = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    for name, level in (("otaro.serve", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class Server(uvicorn.Server):
    """uvicorn with an end of its own."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._service = service
        self._hurried = False
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                ws="none",
                timeout_keep_alive=IDLE_SECONDS,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_graceful_shutdown=int(service.limits.grace) + LAST_SECONDS,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Both signals end the server in good order, and the process goes on behind it.

        Handlers of the interpreter's own, and not the event loop's: those wake the loop through a socket, and are lost
        where that is full because much else wakes it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """End the server; the second time without waiting for answers. From any thread, or a signal's handler."""
        self._hurried = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop()
        ending = asyncio.create_task(self._end_answers())
        await super().shutdown(sockets)
        ending.cancel()
        if self.force_exit:  # uvicorn would leave the app's own end out
            await self.lifespan.shutdown()

    async def _end_answers(self) -> None:
        end = time.monotonic() + self._service.limits.grace
        while time.monotonic() < end and not self._hurried:
            await asyncio.sleep(MOMENT)
        self._service.cancel()
        while not self._hurried:
            await asyncio.sleep(MOMENT)
        await asyncio.sleep(HURRIED_SECONDS)
        self.force_exit = True


def run(app: ASGIApp, service: Service, listening: socket.socket) -> None:
    """Serve until a signal comes."""
    try:
        asyncio.run(Server(app, service).serve(sockets=[listening]))
    finally:
        service.close()
