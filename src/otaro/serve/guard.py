"""What a request must have before anything of it is read: it comes from where it may, with a key, and is not too large.

A page of another site can make a browser send requests to a server on the same machine, and can even have its own name
lead there (DNS rebinding). So a request that a browser marks as another site's is refused unless that site is allowed,
and a server that listens on this machine alone and asks for no key takes only its own names for a host.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from otaro.serve.problems import Problem
from otaro.serve.static import PAGE

OPEN = (*PAGE, "/health", "/openapi.json")
"""What needs no key: the page, which asks for one, and whether the server is there."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""With every answer: the page runs no script but its own, and no other site shows it."""


class Guard:
    """Stands before an app; `count` hears the route and status of every request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Collection[str],
        largest: int,
        origins: Collection[str],
        hosts: Collection[str] | None,
        count: Callable[[str, int], None],
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._largest = largest
        self._origins = origins
        self._hosts = hosts
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # without an answer: a websocket is closed
        headers = Headers(scope=scope)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
                route = getattr(scope.get("route"), "path", "other")
                self._count(route, message["status"])
            await send(message)

        try:
            scope.setdefault("state", {})["client"] = self._admit(scope, headers)
        except Problem as problem:
            await problem.response(scope, receive, answer)
            return
        await self._app(scope, self._bounded(receive), answer)

    def _admit(self, scope: Scope, headers: Headers) -> str:
        """Who the client is, if it may come in."""
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            raise Problem(403, "this server answers to its own name alone: use localhost", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and _place(origin) != headers.get("host"):
            raise Problem(403, "requests from other sites are not allowed here (--cors allows one)", code="origin")
        client = scope.get("client")
        name = client[0] if client else "unknown"
        if self._keys and scope["path"] not in OPEN:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""
            matching = [secrets.compare_digest(given, known) for known in self._keys]
            if not any(matching):
                raise Problem(
                    401,
                    "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            if len(self._keys) > 1:  # clients with keys of their own are told apart by them, wherever they are
                name = f"key {matching.index(True) + 1}"
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._largest:
            raise self._too_large()
        return name

    def _too_large(self) -> Problem:
        return Problem(
            413,
            f"the body is larger than {self._largest} bytes",
            code="body_too_large",
            headers={"Connection": "close"},
        )

    def _bounded(self, receive: Receive) -> Receive:
        """A body that does not say how large it is, up to the limit."""
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._largest:
                raise self._too_large()
            return message

        return bounded


def _host(value: str) -> str | None:
    try:
        return urlsplit(f"//{value}").hostname
    except ValueError:
        return None


def _place(origin: str) -> str | None:
    """Host and port of an origin, written as in the header Host."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None
