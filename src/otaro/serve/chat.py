"""/v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from otaro.serve.answer import Piece
from otaro.serve.openai import ChatBody
from otaro.serve.problems import Problem
from otaro.serve.service import Service, Wanted
from otaro.serve.writing import STREAMED, collect, stream, whole
from otaro.text import NO_TOKENS
from otaro.tokenizer import render_chat

router = APIRouter()


@router.post("/v1/chat/completions", summary="Answer a conversation", responses=STREAMED)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    service: Service = request.app.state.service
    body.check()
    choice = service.control.choose(body.model, body.precision)
    messages = [message.for_template() for message in body.messages]
    letters = sum(len(str(message)) for message in messages)
    prompt = await service.prepare(request, letters, _render, service.tokenizer, messages, body.offered_tools)
    tokens = service.room(prompt, body.limit)
    wanted = [Wanted(prompt, body.sampling(index), tokens, counted=index == 0) for index in range(body.choices)]
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    generation = await service.begin(request, "chatcmpl", wanted, choice, body.stops, logprobs)

    def logprobs_of(pieces: list[Piece]) -> Any:
        found = [token for piece in pieces for token in piece.tokens]
        return service.texts.chat(found) if logprobs is not None and found else None

    def choices(piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.text or piece.tokens:
            yield _chunk(piece.index, {"content": piece.text}, logprobs_of([piece]))
        if piece.finish is not None:
            yield _chunk(piece.index, {}, None, piece.finish)

    if body.stream:
        opening = [_chunk(index, {"role": "assistant", "content": ""}) for index in range(len(wanted))]
        return stream(service, generation, "chat.completion.chunk", body.with_usage, opening, choices)
    finished = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None},
            "logprobs": logprobs_of(pieces),
            "finish_reason": pieces[-1].finish,
        }
        for index, pieces in enumerate(await collect(generation))
    ]
    return JSONResponse(whole(service, generation, "chat.completion", finished))


def _render(tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
    try:
        prompt = render_chat(tokenizer, messages, tools=tools)
    except RecursionError as error:
        raise Problem(400, "the tools are nested too deeply", param="tools") from error
    if not prompt:
        raise Problem(400, NO_TOKENS, param="messages")
    return prompt


def _chunk(index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
