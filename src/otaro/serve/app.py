"""The app: routes, what stands before them, and what runs beside them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from otaro import __version__
from otaro.serve import chat, completions, problems, status
from otaro.serve.guard import Guard
from otaro.serve.service import ClientGoneError, Service
from otaro.serve.static import page_router

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request cannot be answered; `error.message` says why."},
    401: {"description": "The API key is missing or wrong."},
    403: {"description": "The request comes from another site."},
    404: {"description": "There is no such address, model or answer."},
    413: {"description": "The body is too large."},
    429: {"description": "Too many requests wait; see Retry-After."},
    503: {"description": "The server is stopping, or no turn came in time."},
}


def make_app(
    service: Service,
    *,
    keys: Collection[str] = (),
    origins: Collection[str] = (),
    hosts: Collection[str] | None = None,
) -> ASGIApp:
    """The app that serves a model. `hosts` are the names it answers to; any if None."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(service.watch())
        try:
            yield
        finally:
            watching.cancel()

    app = FastAPI(
        title="otaro serve",
        version=__version__,
        description="A packed language model at every precision, behind OpenAI's API.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=ERRORS,
    )
    app.state.service = service
    for router in (chat.router, completions.router, status.router, page_router()):
        app.include_router(router)
    problems.install(app)

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # nobody hears it

    _describe(app, list(service.control.model_ids()))
    guarded: ASGIApp = Guard(
        app,
        keys=keys,
        largest=service.limits.body,
        origins=origins,
        hosts=hosts,
        count=lambda route, code: service.metrics.requests.labels(route, str(code)).inc(),
    )
    if origins:
        guarded = CORSMiddleware(
            guarded, allow_origins=list(origins), allow_methods=["GET", "POST", "PUT"], allow_headers=["*"]
        )
    return guarded


def _describe(app: FastAPI, models: list[str]) -> None:
    """The models by name; wrong bodies are answered with 400, as OpenAI does, and never with FastAPI's 422."""
    described = app.openapi()
    for body in ("ChatBody", "CompletionBody"):
        described["components"]["schemas"][body]["properties"]["model"] = {"enum": [None, *models]}
    for methods in described["paths"].values():
        for method in methods.values():
            method["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        described["components"]["schemas"].pop(name, None)
