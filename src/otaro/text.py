"""The text side of generating: what a prompt becomes, where an answer ends, what came out.

Whatever runs the model, its tokens go through here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from otaro.errors import OtaroError
from otaro.precision import Precision
from otaro.tokenizer import decode, encode_prompt, render_chat

UNFINISHED = "\ufffd"
"""What a decoder puts where a character's last bytes are still to come."""
NO_TOKENS = "the prompt has no tokens: give some text to go on from"
PROMPT_TAIL = 8
"""Tokens of a prompt that the text of an answer is made with, more than a character has."""
MOST_HELD = 8
"""Tokens that may wait for the end of a character: with more of them there is none, the bytes are no text."""


@dataclass(frozen=True)
class GenerationResult:
    """What came out and how fast; `tokens_per_second` counts from the first token on, without reading the prompt.

    `width` is the one in use at the end, `widths` how many tokens each width made, in the order they came into use.
    """

    text: str
    tokens: int
    seconds: float
    tokens_per_second: float
    first_token_seconds: float
    width: Precision
    widths: Mapping[Precision, int]

    @property
    def widths_text(self) -> str:
        """The width of an answer, or the tokens of each width if there were several."""
        if len(self.widths) < 2:
            return str(self.width)
        return ", ".join(f"{width} for {count}" for width, count in self.widths.items())

    def to_json(self) -> dict[str, Any]:
        widths = {str(width): count for width, count in self.widths.items()}
        return {**asdict(self), "width": str(self.width), "widths": widths}


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
        if text.endswith(UNFINISHED) and len(self._tokens) - self._done < MOST_HELD:
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


def prompt_tokens(tokenizer: Any, prompt: str, *, raw: bool = False) -> list[int]:
    """The prompt's tokens: a user's message in the model's chat template, or as it stands."""
    if not prompt:
        raise OtaroError("the prompt is empty: give --prompt TEXT or pipe one in")
    if raw or tokenizer.chat_template is None:
        ids = encode_prompt(tokenizer, prompt)
    else:
        ids = render_chat(tokenizer, [{"role": "user", "content": prompt}])
    if not ids:
        raise OtaroError(NO_TOKENS)
    return ids


def end_tokens(tokenizer: Any, *configured: Any) -> list[int]:
    """What ends an answer: the model's own end tokens, each setting one or a list, and the tokenizer's."""
    tokens = [token for entry in configured for token in (entry if isinstance(entry, list) else [entry])]
    return list(dict.fromkeys(token for token in [*tokens, tokenizer.eos_token_id] if type(token) is int))


def check_room(prompt: int, new: int, context: int) -> None:
    """Refuse more tokens, in the prompt and new, than the context holds."""
    if prompt + new > context:
        raise OtaroError(
            f"{prompt} tokens of prompt and {new} new ones do not fit the context of {context}: "
            "shorten the prompt or ask for fewer"
        )
