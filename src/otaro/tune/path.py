"""Which width the next batch is computed at.

BPS, the exploitation-exploration bit-width path search: at batch t it picks

    argmax_b  λ·sqrt(ln t / t_b) − L_b

where t_b counts how often width b was picked and L_b is the latest loss seen at it. The first term makes neglected
widths attractive, the second prefers widths with a small loss; as t grows the first fades and the path leans toward the
wider widths, whose gradients agree best with everybody's. A width that was never picked goes first, the widest of them
leading, so nothing is divided by zero; ties go to the wider one.

The baselines are paths too: one width for all batches, widths drawn at random, and no width at all (full precision).
Pure Python; a path's state is JSON.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from otaro.errors import OtaroError
from otaro.precision import Precision, join


class Path(ABC):
    """Chooses a width for each batch and is told the loss it gave."""

    def __init__(self, widths: Iterable[Precision]) -> None:
        self.widths = sorted(set(widths), reverse=True)
        self.counts: dict[Precision, int] = dict.fromkeys(self.widths, 0)
        self.losses: dict[Precision, float] = {}

    @abstractmethod
    def choose(self) -> Precision | None:
        """The width of the next batch; None is full precision. Asking twice without `record` gives the same."""

    def record(self, width: Precision | None, loss: float) -> None:
        """A batch was computed at `width` and gave `loss`."""
        if width is not None:
            self.counts[width] += 1
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
                f"the checkpoint's path is over {join(counts)}, not over {join(self.widths)}: "
                "resume with the widths the run was begun with"
            )
        self.counts = {width: counts[width] for width in self.widths}
        self.losses = {Precision(width): loss for width, loss in state["losses"].items()}


class BitWidthPathSearch(Path):
    """BPS. `exploration` is the paper's λ."""

    def __init__(self, widths: Iterable[Precision], exploration: float = 5.0) -> None:
        super().__init__(widths)
        self.exploration = exploration

    def choose(self) -> Precision:
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


class UniformPath(Path):
    """Every width with the same probability, from a seed."""

    def __init__(self, widths: Iterable[Precision], seed: int = 0) -> None:
        super().__init__(widths)
        self._random = random.Random(seed)
        self._chosen: Precision | None = None

    def choose(self) -> Precision:
        if self._chosen is None:
            self._chosen = self._random.choice(self.widths)
        return self._chosen

    def record(self, width: Precision | None, loss: float) -> None:
        super().record(width, loss)
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


class FixedPath(Path):
    """One width for every batch, or full precision."""

    def __init__(self, width: Precision | None) -> None:
        super().__init__([] if width is None else [width])
        self._width = width

    def choose(self) -> Precision | None:
        return self._width


WORTH_A_TURN = 0.04
"""How much worse than at the widest width a loss before tuning must be for a width to have turns of its own."""


def is_hurt(losses: Mapping[Precision, float], widest: Precision, width: Precision) -> bool:
    """Whether a model loses enough by rounding to a width, before tuning, for turns at it to pay."""
    return losses[width] - losses[widest] >= WORTH_A_TURN


class TieredPath(Path):
    """The widest width; every third time the narrowest that is wider than all tiers, if rounding to it hurts the model.

    Whether it does, the losses before tuning tell (`begin`, to be told again after a resume); docs/results.md has the
    trials. The trainer then goes through the tiers by itself (see `otaro.tune.tiers`).
    """

    def __init__(self, widths: Iterable[Precision], tiers: Iterable[Precision]) -> None:
        super().__init__(widths)
        widest_tier = max(tiers, default=None)
        wide = [width for width in self.widths if widest_tier is None or width > widest_tier]
        if not wide:
            raise OtaroError(f"the widest of {join(self.widths)} has a tier: leave it without")
        self.wide = (wide[0], wide[-1])
        self._turns: tuple[Precision, ...] = self.wide[:1]

    def begin(self, losses: Mapping[Precision, float]) -> None:
        """Learn the losses at the wide widths before tuning."""
        widest, narrowest = self.wide
        self._turns = (widest, widest, narrowest) if is_hurt(losses, widest, narrowest) else (widest,)

    def choose(self) -> Precision:
        return self._turns[sum(self.counts[width] for width in set(self.wide)) % len(self._turns)]


def make_path(
    method: str,
    widths: Iterable[Precision],
    *,
    exploration: float = 5.0,
    seed: int = 0,
    tiers: Iterable[Precision] = (),
) -> Path:
    """The path of a method: ``otaro`` and ``bps`` search, ``uniform`` draws, ``fixed:E5M3`` stays, ``fp16`` is none.

    ``tiers`` goes through the widths without a tier; which tier has its turn beside, `otaro.tune.tiers` says.
    """
    name, _, width = method.partition(":")
    widths = list(widths)
    if not widths:
        raise OtaroError("there are no widths to tune for: name at least one, such as E5M4")
    if name in ("otaro", "bps") and not width:
        return BitWidthPathSearch(widths, exploration)
    if name == "uniform" and not width:
        return UniformPath(widths, seed)
    if name == "tiers" and not width:
        return TieredPath(widths, tiers)
    if name == "fp16" and not width:
        return FixedPath(None)
    if name == "fixed" and width:
        return FixedPath(Precision(width))
    raise OtaroError(f"unknown method {method!r}: choose otaro, bps, uniform, tiers, fixed:E5M8 … fixed:E5M3 or fp16")
