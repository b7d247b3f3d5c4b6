"""A server for tests, in a thread of this process; and a scheduler whose tokens come when a test says so."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from otaro.engine.engine import Engine
from otaro.engine.scheduler import Request, Token
from otaro.precision import NARROWEST, Precision
from otaro.serve.app import make_app
from otaro.serve.control import Control
from otaro.serve.listening import address_of, bind
from otaro.serve.opening import open_service
from otaro.serve.server import Server
from otaro.serve.service import Limits, Service
from otaro.tokenizer import load_tokenizer

TIMEOUT = 60.0


def until(condition: Callable[[], Any], seconds: float = TIMEOUT) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


@dataclass
class Served:
    """A running server, and a client of it."""

    url: str
    service: Service
    client: httpx2.Client
    stop: Callable[[], None]
    """What a signal does."""
    thread: threading.Thread

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return self.client.post(path, json=body, **options)

    def stream(self, body: dict[str, Any], **options: Any) -> Any:
        """A streamed chat that has begun."""
        return self.client.stream("POST", "/v1/chat/completions", json={**SAY, "stream": True, **body}, **options)


SAY = {"messages": [{"role": "user", "content": "Say something"}], "temperature": 0}


@contextmanager
def serving(
    service: Service,
    *,
    keys: Collection[str] = (),
    origins: Collection[str] = (),
    hosts: Collection[str] | None = None,
) -> Iterator[Served]:
    """Serve until the block ends."""
    listening = bind("127.0.0.1", 0)
    url = address_of(listening)
    server = Server(make_app(service, keys=keys, origins=origins, hosts=hosts), service)
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listening]),), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        with httpx2.Client(base_url=url, timeout=TIMEOUT) as client:
            yield Served(url, service, client, server.stop, thread)
    finally:
        server.stop()
        server.stop()  # the second time it waits for nobody
        thread.join(TIMEOUT)
        assert not thread.is_alive()
        service.close()


def open_tiny(folder: Path, **options: Any) -> Service:
    """A tiny model behind the real scheduler, all of it in memory."""
    service = open_service(folder, threads=1, **options)
    service.engine.finish_loading()
    return service


@dataclass(eq=False)
class PacedRunning:
    """An answer whose tokens come one by one, as `Paced` is told."""

    request: Request
    on_token: Callable[[Token | None], None]
    precision: Precision | None
    finish_reason: str | None = None
    error: Exception | None = None
    prompt_reused: int = 0
    made: int = 0

    def cancel(self) -> None:
        if self.finish_reason is None:
            self.end("cancelled")

    def end(self, reason: str) -> None:
        self.finish_reason = reason
        self.on_token(None)


@dataclass
class Paced:
    """In the scheduler's place: nothing comes until a test asks for it."""

    engine: Engine
    all: list[PacedRunning] = field(default_factory=list)
    closed: bool = False

    @property
    def open(self) -> list[PacedRunning]:
        return [one for one in self.all if one.finish_reason is None]

    def submit(self, request: Request, on_token: Callable[[Token | None], None]) -> PacedRunning:
        running = PacedRunning(request, on_token, request.precision)
        self.all.append(running)
        return running

    def step(self, running: PacedRunning, text: str = "a") -> None:
        """One more token, of a tokenizer with a token for every byte."""
        (token,) = load_tokenizer_ids(self.engine, text)
        running.made += 1
        running.on_token(Token(token, running.precision or self.engine.width))

    def close(self, wait: bool = False) -> None:
        self.closed = True
        for running in self.open:
            running.cancel()


def load_tokenizer_ids(engine: Engine, text: str) -> list[int]:
    ids: list[int] = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def open_paced(folder: Path, limits: Limits = Limits(), default: Any = None) -> tuple[Service, Paced]:
    """A server that writes what a test tells it to."""
    engine = Engine(folder, threads=1)
    paced = Paced(engine)
    control = Control(engine, "tiny", default or engine.precision, NARROWEST)
    return Service(engine, paced, load_tokenizer(folder), control, limits), paced  # type: ignore[arg-type]
