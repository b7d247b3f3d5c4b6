"""A text that runs alone, with memory of its own to run in."""

from __future__ import annotations

from collections.abc import Sequence

from otaro.engine.native import Logits, Model
from otaro.engine.session import Session, Work
from otaro.precision import Precision


class Text:
    def __init__(
        self,
        model: Model,
        context: int,
        *,
        cache: Precision | None = None,
        fine: bool = False,
        isa: str | None = None,
    ) -> None:
        self.session = Session(model, context, cache=cache)
        self.work = Work(model, fine=fine, isa=isa)

    def run(self, tokens: Sequence[int], position: int, widths: bytes, *, threads: int, logits: int = 1) -> Logits:
        return self.work.logits(self.session, tokens, position, widths, threads=threads, rows=logits)

    def draft(
        self, token: int, position: int, widths: bytes, *, most: int, rows: int, margin: float, threads: int
    ) -> list[int]:
        return self.work.draft(
            self.session, token, position, widths, most=most, rows=rows, margin=margin, threads=threads
        )
