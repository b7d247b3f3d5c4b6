"""What to generate, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from otaro.engine.sampling import Sampling
from otaro.precision import Precision
from otaro.text import GenerationResult, fitting


@dataclass(frozen=True)
class Request:
    """What to generate, and how. With `at_most`, fewer tokens will do where the context has no room for all of them."""

    max_new_tokens: int
    sampling: Sampling
    prefill: Precision | None = None
    draft: Precision | None = None
    stop: Sequence[str] = ()
    reuse: bool = False
    at_most: bool = False

    def limit(self, room: int) -> int:
        """How many tokens to generate, 1 at least, where the context has room for so many."""
        return fitting(self.max_new_tokens, room) if self.at_most else self.max_new_tokens


class Runner(Protocol):
    """Runs one model; `tokenizer` is its own."""

    tokenizer: Any

    @property
    def precision(self) -> Precision: ...

    @precision.setter
    def precision(self, precision: Precision) -> None: ...

    @property
    def width(self) -> Precision:
        """The width in use: `precision`, or what is loaded of it by now."""

    @property
    def memory(self) -> int:
        """Bytes that the model takes."""

    @property
    def context(self) -> int:
        """Tokens that a text may have, prompt included."""

    @property
    def longest_context(self) -> int:
        """What `context` could be with this model."""

    def generate(
        self,
        prompt: Sequence[int],
        request: Request,
        on_text: Callable[[str], None] | None = None,
        on_width: Callable[[Precision], None] | None = None,
    ) -> GenerationResult:
        """Go on from a prompt; `on_width` hears the width of the first token, and of later ones if it changes."""

    def check_loading(self) -> None:
        """An error, once, if a part of the weights could not be read in the background."""
