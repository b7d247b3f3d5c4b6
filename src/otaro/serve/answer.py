"""An answer while it is made: tokens in, pieces of text out, each with the tokens that it is the text of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from otaro.engine.scheduler import Token
from otaro.precision import Precision
from otaro.text import TextStream


@dataclass(frozen=True)
class Piece:
    """What came of one of the answers since the piece before; `finish` with the last one says why it ended."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    count: int
    """Tokens of the answer so far."""
    width: Precision | None
    """The width of the latest one."""
    finish: str | None = None


class Answer:
    """One answer. Text that is not settled is held back, and so are the tokens that it belongs to."""

    def __init__(self, index: int, tokenizer: Any, stop: Sequence[str], prompt: Sequence[int]) -> None:
        self.index = index
        self.count = 0
        self.widths: dict[Precision, int] = {}
        """How many tokens each width made, in the order they came into use."""
        self.finish: str | None = None
        self._stream = TextStream(tokenizer, stop, prompt)
        self._width: Precision | None = None
        self._text = ""
        self._ready: list[Token] = []
        self._held: list[Token] = []

    @property
    def stopped(self) -> bool:
        """A stop string came: the tokens that follow are not wanted."""
        return self._stream.stopped

    def push(self, token: Token) -> None:
        if self.stopped or self.finish is not None:
            return
        self.count += 1
        self._width = token.width
        self.widths[token.width] = self.widths.get(token.width, 0) + 1
        self._held.append(token)
        self._settle(self._stream.push(token.id))

    def end(self, reason: str) -> None:
        if self.finish is None:
            stopped = self.stopped
            self._settle(self._stream.finish())
            if not stopped:
                self._ready += self._held
            self.finish = "stop" if self.stopped else reason

    def take(self) -> Piece | None:
        """What is new, if anything is."""
        if not self._text and not self._ready and self.finish is None:
            return None
        piece = Piece(self.index, self._text, tuple(self._ready), self.count, self._width, self.finish)
        self._text, self._ready = "", []
        return piece

    def _settle(self, text: str) -> None:
        if text:
            self._text += text
            self._ready += self._held
            self._held = []
