"""Which width the next update is computed at: BPS, the bit-width path search, or a baseline.

docs/method.md has the formula. As updates go by, BPS leans toward the wider widths, whose gradients agree best with
everybody's. A width that was never picked goes first, the widest leading; ties go to the wider one. Pure Python; a
selector's state is JSON.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from otaro.errors import OtaroError
from otaro.precision import Precision, join


class WidthSelector(ABC):
    """Selects the width of each update, and is told which were computed at and, sooner or later, what loss they gave.

    `losses` are the latest ones by width. Where `needs_losses` is true they must be known when the next width is
    selected.
    """

    needs_losses = False

    def __init__(self, widths: Iterable[Precision]) -> None:
        self.widths = sorted(set(widths), reverse=True)
        self.counts: dict[Precision, int] = dict.fromkeys(self.widths, 0)
        self.losses: dict[Precision, float] = {}

    @abstractmethod
    def select(self) -> Precision | None:
        """The width of the next update; None is full precision. Asking twice without `count` gives the same."""

    def count(self, width: Precision | None) -> None:
        """An update was computed at `width`."""
        if width is not None:
            self.counts[width] += 1

    def record(self, width: Precision | None, loss: float) -> None:
        """An update computed at `width` gave `loss`."""
        if width is not None:
            self.losses[width] = loss

    def state_dict(self) -> dict[str, Any]:
        return {
            "counts": {str(width): count for width, count in self.counts.items()},
            "losses": {str(width): loss for width, loss in self.losses.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        counts = {Precision(width): count for width, count in state["counts"].items()}
        if set(counts) != set(self.widths):
            raise OtaroError(
                f"the checkpoint's widths are {join(counts)}, not {join(self.widths)}: "
                "resume with the widths the run was begun with"
            )
        self.counts = {width: counts[width] for width in self.widths}
        self.losses = {Precision(width): loss for width, loss in state["losses"].items()}


class BitWidthPathSearch(WidthSelector):
    """BPS. `exploration` is the paper's λ."""

    needs_losses = True

    def __init__(self, widths: Iterable[Precision], exploration: float = 5.0) -> None:
        super().__init__(widths)
        self.exploration = exploration

    def select(self) -> Precision:
        for width in self.widths:
            if self.counts[width] == 0:
                return width
        scores = self.scores()
        return max(self.widths, key=lambda width: (scores[width], width.mantissa))

    def scores(self) -> dict[Precision, float]:
        """The score of every width for the batch to come; all widths must have been picked."""
        batch = sum(self.counts.values()) + 1
        return {
            width: self.exploration * math.sqrt(math.log(batch) / self.counts[width]) - self.losses[width]
            for width in self.widths
        }


class UniformSelector(WidthSelector):
    """Every width with the same probability, from a seed."""

    def __init__(self, widths: Iterable[Precision], seed: int = 0) -> None:
        super().__init__(widths)
        self._random = random.Random(seed)
        self._chosen: Precision | None = None

    def select(self) -> Precision:
        if self._chosen is None:
            self._chosen = self._random.choice(self.widths)
        return self._chosen

    def count(self, width: Precision | None) -> None:
        super().count(width)
        self._chosen = None

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = self._random.getstate()
        chosen = None if self._chosen is None else str(self._chosen)
        return {**super().state_dict(), "random": [version, list(internal), gauss], "chosen": chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))
        self._chosen = None if state["chosen"] is None else Precision(state["chosen"])


class FixedSelector(WidthSelector):
    """One width for every batch, or full precision; `fitted` are then those that are fitted to it."""

    def __init__(self, width: Precision | None, fitted: Iterable[Precision] = ()) -> None:
        super().__init__(fitted if width is None else [width])
        self._width = width

    def select(self) -> Precision | None:
        return self._width


def make_selector(
    method: str, widths: Iterable[Precision], *, exploration: float = 5.0, seed: int = 0
) -> WidthSelector:
    """That of a method: ``otaro`` and ``bps`` search, ``uniform`` draws, ``fixed:E5M3`` stays, ``fp16`` has no width.

    So has ``tiers``, but widths that are fitted.
    """
    widths = list(widths)
    if not widths:
        raise OtaroError("there are no widths to tune for: name at least one, such as E5M4")
    if method in ("otaro", "bps"):
        return BitWidthPathSearch(widths, exploration)
    if method == "uniform":
        return UniformSelector(widths, seed)
    if method in ("tiers", "fp16"):
        return FixedSelector(None, widths if method == "tiers" else ())
    name, _, width = method.partition(":")
    if name == "fixed" and width:
        return FixedSelector(Precision(width))
    raise OtaroError(f"unknown method {method!r}: choose otaro, bps, uniform, tiers, fixed:E5M8 … fixed:E5M3 or fp16")
