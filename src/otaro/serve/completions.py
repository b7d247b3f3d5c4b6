"""/v1/completions: text that goes on from a prompt as it stands, and the log probabilities of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from otaro.engine.scheduler import Token
from otaro.serve.answer import Piece
from otaro.serve.openai import CompletionBody
from otaro.serve.problems import Problem
from otaro.serve.service import Service, Wanted
from otaro.serve.writing import STREAMED, collect, stream, whole
from otaro.text import NO_TOKENS
from otaro.tokenizer import decode, encode_prompt

router = APIRouter()
DEFAULT_TOKENS = 16
"""As OpenAI has it."""


@router.post("/v1/completions", summary="Go on from a prompt", responses=STREAMED)
async def completions(body: CompletionBody, request: Request) -> Response:
    service: Service = request.app.state.service
    body.check()
    choice = service.control.choose(body.model, body.precision)
    prompts = [
        await service.prepare(
            request, len(prompt) if isinstance(prompt, str) else 0, _tokens, service.tokenizer, prompt
        )
        for prompt in body.prompts
    ]
    rooms = [service.room(prompt, body.max_tokens or DEFAULT_TOKENS) for prompt in prompts]
    # Who has a prompt scored asks for one token more and counts on it, even if it is the end.
    scoring = bool(body.echo) and body.logprobs is not None and body.max_tokens == 1
    wanted = [
        Wanted(prompt, body.sampling(index), tokens, counted=index == 0, endless=scoring)
        for prompt, tokens in zip(prompts, rooms, strict=True)
        for index in range(body.choices)
    ]
    generation = await service.begin(request, "cmpl", wanted, choice, body.stops, body.logprobs)
    offsets = [0] * len(wanted)

    def logprobs_of(index: int, tokens: list[Token]) -> Any:
        if body.logprobs is None:
            return None
        found = service.texts.completion(tokens, offsets[index], body.logprobs)
        offsets[index] += sum(map(len, found["tokens"]))
        return found

    def choices(piece: Piece) -> Iterator[dict[str, Any]]:
        yield _choice(piece.index, piece.text, logprobs_of(piece.index, list(piece.tokens)), piece.finish)

    if body.stream:
        return stream(service, generation, "text_completion", body.with_usage, (), choices)
    finished, scored = [], dict[int, list[Token]]()
    for index, pieces in enumerate(await collect(generation)):
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        if body.echo:
            prompt = list(wanted[index].prompt)
            text = decode(service.tokenizer, prompt) + text
            if body.logprobs is not None:
                number = index // body.choices  # of the prompt, which several answers may have
                if number not in scored:
                    width, _ = service.control.decode(choice)
                    scored[number] = await service.score(request, prompt, choice.prefill or width, body.logprobs)
                tokens = scored[number] + tokens
        finished.append(_choice(index, text, logprobs_of(index, tokens), pieces[-1].finish))
    return JSONResponse(whole(service, generation, "text_completion", finished))


def _tokens(tokenizer: Any, prompt: str | list[int]) -> list[int]:
    tokens = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt
    if not tokens:
        raise Problem(400, NO_TOKENS, param="prompt")
    return tokens


def _choice(index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
