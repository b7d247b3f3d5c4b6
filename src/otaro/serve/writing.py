"""How answers are written down: one JSON object, or server-sent events in the order that OpenAI's clients expect.

A stream is: for chats a piece with the role for every answer, pieces of text, for every answer a piece that says why it
ended, the usage if it was asked for, and ``[DONE]``. Each piece carries `otaro`: the width of its latest token, and how
many tokens the answer has by now.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from fastapi.responses import StreamingResponse

from otaro.serve.answer import Piece
from otaro.serve.problems import Problem
from otaro.serve.service import ClientGoneError, Generation, Service

Json = dict[str, Any]
STREAMED: dict[int | str, Json] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
"""What is answered, for the document that describes the API."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def head(service: Service, generation: Generation, kind: str) -> Json:
    """What every object of an answer begins with."""
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": generation.model,
        "system_fingerprint": service.fingerprint,
    }


def stream(
    service: Service,
    generation: Generation,
    kind: str,
    with_usage: bool,
    opening: Iterable[Json],
    choice: Callable[[Piece], Iterable[Json]],
) -> StreamingResponse:
    """Answers as they come; `opening` are choices to begin with, `choice` makes those of a piece."""
    first = head(service, generation, kind)
    if with_usage:
        first["usage"] = None

    async def events() -> AsyncIterator[bytes]:
        for entry in opening:
            yield event({**first, "choices": [entry]})
        try:
            async for piece in generation.pieces():
                width = None if piece.width is None else str(piece.width)
                progress = {"width": width, "tokens": piece.count}
                for entry in choice(piece):
                    yield event({**first, "choices": [entry], "otaro": progress})
        except Problem as problem:
            yield event(problem.body)
            return
        except ClientGoneError:
            return
        if with_usage:
            extra = {"widths": generation.widths}
            yield event({**first, "choices": [], "usage": generation.usage, "otaro": extra})
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers=STREAM_HEADERS)


def event(content: Json) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def whole(service: Service, generation: Generation, kind: str, choices: list[Json]) -> Json:
    """Finished answers as one object."""
    return {
        **head(service, generation, kind),
        "choices": choices,
        "usage": generation.usage,
        "otaro": {"widths": generation.widths},
    }


async def collect(generation: Generation) -> list[list[Piece]]:
    """All pieces of each of the answers."""
    pieces: list[list[Piece]] = [[] for _ in generation.answers]
    async for piece in generation.pieces():
        pieces[piece.index].append(piece)
    return pieces
