"""Text from a loaded model, piece by piece as it is made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from otaro.errors import OtaroError, foreign_code
from otaro.model_config import check_tokens, context_length
from otaro.precision import Precision
from otaro.tokenizer import decode, encode_prompt, render_chat

UNFINISHED = "\ufffd"
"""What a decoder puts where a character's last bytes are still to come."""
PROMPT_TAIL = 8
"""Tokens of a prompt that the text of an answer is made with, more than a character has."""


@dataclass(frozen=True)
class GenerationResult:
    """What came out and how fast; `tokens_per_second` counts from the first token on, without reading the prompt.

    `precision` is the width at the end, `widths` how many tokens each width made, in the order they came into use.
    """

    text: str
    tokens: int
    seconds: float
    tokens_per_second: float
    first_token_seconds: float
    precision: Precision
    widths: Mapping[Precision, int]

    @property
    def widths_text(self) -> str:
        """The width of an answer, or the tokens of each width if there were several."""
        if len(self.widths) < 2:
            return str(self.precision)
        return ", ".join(f"{width} for {count}" for width, count in self.widths.items())

    def to_json(self) -> dict[str, Any]:
        widths = {str(width): count for width, count in self.widths.items()}
        return {**asdict(self), "precision": str(self.precision), "widths": widths}


class StopText:
    """Text that ends before the first of some strings; what may be the beginning of one is held back."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise OtaroError("a stop string is empty: leave it out")
        self._stop = list(stop)
        self._pending = ""
        self.stopped = False
        """One of the strings came; nothing follows."""

    def push(self, text: str) -> str:
        """What is settled by more text."""
        if self.stopped:
            return ""
        self._pending += text
        found = [place for place in (self._pending.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped = True
            return self._pending[: min(found)]
        held = max((_overlap(self._pending, stop) for stop in self._stop), default=0)
        cut = len(self._pending) - held
        settled, self._pending = self._pending[:cut], self._pending[cut:]
        return settled

    def finish(self) -> str:
        """What was held back, at the end."""
        rest, self._pending = "" if self.stopped else self._pending, ""
        return rest


class TextStream:
    """Tokens to text as it settles: a character in several tokens, or what may be a stop string, is held back.

    What they are the text of may depend on the tokens before them, the `prompt`: SentencePiece drops a space where a
    text begins.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._settled = StopText(stop)
        self._tokens = list(prompt[-PROMPT_TAIL:])
        # Tokens from _context to _done have been given out, and give the next ones context.
        self._context, self._done = 0, len(self._tokens)

    @property
    def stopped(self) -> bool:
        """A stop string came; nothing follows."""
        return self._settled.stopped

    def push(self, token: int) -> str:
        """The text that is settled by one more token."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._done])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(UNFINISHED):
            return ""
        self._context, self._done = self._done, len(self._tokens)
        return self._settled.push(text[len(before) :])

    def finish(self) -> str:
        """What is left at the end."""
        before = self._decode(self._tokens[self._context : self._done])
        return self._settled.push(self._decode(self._tokens[self._context :])[len(before) :]) + self._settled.finish()

    def _decode(self, tokens: list[int]) -> str:
        return decode(self._tokenizer, tokens)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text could begin the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def fitting(tokens: int, room: int) -> int:
    """So many new tokens, or fewer where the context has no room for them; one at least, which may be refused."""
    return max(1, min(tokens, room))


def prompt_tokens(tokenizer: Any, prompt: str, *, raw: bool = False) -> Tensor:
    """The prompt as [1, tokens]: a user's message in the model's chat template, or as it stands."""
    if not prompt:
        raise OtaroError("the prompt is empty: give --prompt TEXT or pipe one in")
    if raw or tokenizer.chat_template is None:
        ids = encode_prompt(tokenizer, prompt)
    else:
        ids = render_chat(tokenizer, [{"role": "user", "content": prompt}])
    if not ids:
        raise OtaroError("the prompt has no tokens: give some text to go on from")
    return torch.tensor([ids])


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
    raw: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> GenerationResult:
    """Go on from a prompt with a transformers causal LM, at the width it is set to.

    Temperature 0 takes the likeliest token each time; above it, tokens are drawn, the same ones again for the same
    `seed`. `on_text` gets each piece of text as soon as it is settled. The prompt goes through the tokenizer's chat
    template if there is one, unless `raw`.
    """
    if max_new_tokens < 1:
        raise OtaroError(f"max_new_tokens is {max_new_tokens}: ask for at least 1 token")
    if temperature < 0:
        raise OtaroError(f"temperature is {temperature}: it must be 0 or more")
    return continue_tokens(
        model,
        tokenizer,
        prompt_tokens(tokenizer, prompt, raw=raw),
        max_new_tokens=max_new_tokens,
        settings={"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False},
        seed=seed,
        on_text=on_text,
    )


@torch.inference_mode()
def continue_tokens(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    *,
    max_new_tokens: int,
    context: int | None = None,
    settings: dict[str, Any],
    seed: int | None = None,
    stop: Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
) -> GenerationResult:
    """Go on from tokens, [1, tokens], until one of the `stop` strings; `settings` go to transformers' generate.

    `context` is how many tokens there may be in all; what the model allows if left out.
    """
    ids = ids.to(model.device)
    context = context or context_length(model)
    if ids.shape[1] + max_new_tokens > context:
        raise OtaroError(
            f"{ids.shape[1]} tokens of prompt and {max_new_tokens} new ones do not fit the context of "
            f"{context}: shorten the prompt or ask for fewer"
        )
    check_tokens(model, int(ids.max()))
    end_tokens = _end_tokens(model, tokenizer)
    streamer = _Streamer(tokenizer, stop, on_text)
    if stop:
        settings = {**settings, "stop_strings": list(stop), "tokenizer": tokenizer}
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        start = time.perf_counter()
        with streamer.callers_errors(), foreign_code("transformers cannot go on from this prompt"):
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                eos_token_id=end_tokens or None,
                pad_token_id=end_tokens[0] if end_tokens else 0,
                streamer=streamer,
                **settings,
            )
    seconds = time.perf_counter() - start
    first_token_seconds = streamer.first_token_time - start
    decoding = seconds - first_token_seconds
    return GenerationResult(
        text="".join(streamer.pieces),
        tokens=streamer.tokens,
        seconds=seconds,
        tokens_per_second=(streamer.tokens - 1) / decoding if streamer.tokens > 1 else 1 / seconds,
        first_token_seconds=first_token_seconds,
        precision=model.precision,
        widths={model.precision: streamer.tokens},
    )


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """What ends an answer: the model's own end tokens, and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    tokens = configured if isinstance(configured, list) else [configured]
    return list(dict.fromkeys(token for token in [*tokens, tokenizer.eos_token_id] if type(token) is int))


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Hands over each piece of text, and notes when the first token came and how many there were."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], on_text: Callable[[str], None] | None) -> None:
        self._tokenizer, self._stop, self._on_text = tokenizer, stop, on_text
        self._stream: TextStream | None = None
        self.pieces: list[str] = []
        self._raised: BaseException | None = None
        self.tokens = 0
        self.first_token_time = 0.0

    def put(self, value: Tensor) -> None:
        tokens = value.flatten().tolist()
        if self._stream is None:  # the prompt comes first
            self._stream = TextStream(self._tokenizer, self._stop, tokens)
            return
        if self.tokens == 0:
            self.first_token_time = time.perf_counter()
        self.tokens += len(tokens)
        for token in tokens:
            self._hand_over(self._stream.push(token))

    def end(self) -> None:
        if self._stream is not None:
            self._hand_over(self._stream.finish())

    def _hand_over(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)
            if self._on_text is not None:
                try:
                    self._on_text(piece)
                except BaseException as error:
                    self._raised = error
                    raise

    @contextlib.contextmanager
    def callers_errors(self) -> Iterator[None]:
        """What `on_text` raised comes out as it was, whatever was made of it on the way."""
        try:
            yield
        except OtaroError:
            if self._raised is not None:
                raise self._raised from None
            raise
