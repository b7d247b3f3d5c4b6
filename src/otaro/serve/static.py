"""The page: a few files that come with the package, read once; nothing of a request becomes part of a path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/answer.js": ("answer.js", "text/javascript"),
    "/api.js": ("api.js", "text/javascript"),
    "/speed.js": ("speed.js", "text/javascript"),
    "/words.js": ("words.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""The files by their addresses; there are no others."""


def page_router() -> APIRouter:
    router = APIRouter()
    folder = resources.files("otaro.serve") / "page"
    for address, (name, kind) in PAGE.items():
        router.add_route(address, _file((folder / name).read_bytes(), kind), include_in_schema=False)
    return router


def _file(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return answer
