"""Text from an engine, piece by piece as it is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from otaro import text
from otaro.engine.sampling import Sampling
from otaro.precision import Precision
from otaro.text import GenerationResult, TextStream, fitting

if TYPE_CHECKING:
    from otaro.engine.engine import Engine

DEFAULT_TOKENS = 256


def generate(
    engine: Engine,
    tokenizer: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling = Sampling(),
    prefill: Precision | str | None = None,
    overrides: Mapping[str, Precision | str] | None = None,
    draft: Precision | str | None = None,
    stop: str | Sequence[str] = (),
    reuse: bool = False,
    on_text: Callable[[str], None] | None = None,
    on_width: Callable[[Precision], None] | None = None,
) -> GenerationResult:
    """Go on from a prompt's tokens at the engine's precision; the settings are those of `Engine.tokens`.

    `on_text` gets each piece of text as soon as it is settled, `on_width` the width before the first token and whenever
    another one is in use. An answer ends at one of the model's end tokens, before one of the `stop` strings, or after
    `max_new_tokens`; these are 256 if left out, or as many as the context has room for.
    """
    if max_new_tokens is None:
        max_new_tokens = fitting(DEFAULT_TOKENS, engine.context - len(prompt))
    stream = TextStream(tokenizer, [stop] if isinstance(stop, str) else stop, prompt)
    start = time.perf_counter()
    first = 0.0
    widths: dict[Precision, int] = {}
    width: Precision | None = None
    pieces: list[str] = []

    def hand_over(piece: str) -> None:
        if piece:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)

    tokens = engine.tokens(
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        prefill=prefill,
        overrides=overrides,
        draft=draft,
        end=end_tokens(engine, tokenizer),
        reuse=reuse,
    )
    with closing(tokens):  # at once, whatever `on_text` may raise: the next text waits for that
        for token in tokens:
            if not widths:
                first = time.perf_counter() - start
            if engine.used != width:
                width = engine.used
                if on_width is not None:
                    on_width(width)
            widths[width] = widths.get(width, 0) + 1
            hand_over(stream.push(token))
            if stream.stopped:
                break
    hand_over(stream.finish())
    seconds = time.perf_counter() - start
    count = sum(widths.values())
    return GenerationResult(
        text="".join(pieces),
        tokens=count,
        seconds=seconds,
        tokens_per_second=(count - 1) / (seconds - first) if count > 1 else count / seconds,
        first_token_seconds=first,
        width=engine.width if width is None else width,
        widths=widths,
    )


def end_tokens(engine: Engine, tokenizer: Any) -> list[int]:
    """What ends an answer: the model's own end tokens, and the tokenizer's."""
    return text.end_tokens(tokenizer, engine.weights.config.eos_token_id, engine.weights.generation.get("eos_token_id"))
