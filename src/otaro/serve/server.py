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
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from otaro.serve.service import Service

LAST_SECONDS = 5
"""How long the connections of answers that were ended have to be closed."""
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
        self._ending: asyncio.Task[None] | None = None
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
        """Both signals end the server in good order, and the process goes on behind it."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        try:
            for number in signals:
                loop.add_signal_handler(number, self.stop)
        except (NotImplementedError, RuntimeError, ValueError):  # on Windows, or not in the main thread
            with super().capture_signals():
                yield
            return
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """End the server; the second time without waiting for answers."""
        if self.should_exit:
            self.force_exit = True
            self._service.cancel()
            return
        self.should_exit = True
        self._service.stop()
        self._ending = asyncio.get_running_loop().create_task(self._end_answers())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would leave the app's own end out
            await self.lifespan.shutdown()

    async def _end_answers(self) -> None:
        await asyncio.sleep(self._service.limits.grace)
        self._service.cancel()


def run(app: ASGIApp, service: Service, listening: socket.socket) -> None:
    """Serve until a signal comes."""
    try:
        asyncio.run(Server(app, service).serve(sockets=[listening]))
    finally:
        service.close()
