"""Picking the next token from logits.

The likeliest at temperature 0; above it a draw from the softmax of logits / temperature, after what is unlikely has
been taken out: all but the `top_k` likeliest, all beyond the fewest that together reach `top_p`, all below `min_p`
times the likeliest. A repetition penalty above 1 makes tokens that are there already less likely, in both cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from otaro.engine.native import Logits
from otaro.engine.numbers import is_finite, shown, whole
from otaro.errors import OtaroError

Probabilities = NDArray[numpy.float64]


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked; the same `seed` draws the same tokens again. The defaults take the likeliest."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if not is_finite(value):
                raise OtaroError(f"{name} is {shown(value)}: it must be a number")
            object.__setattr__(self, name, float(value))
        for name, valid, expected in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100"),
        ):
            if not valid:
                raise OtaroError(f"{name} is {getattr(self, name)}: it must be {expected}")
        object.__setattr__(self, "top_k", whole("top_k", self.top_k, 0, 2**31 - 1))
        if self.seed is not None:
            object.__setattr__(self, "seed", whole("seed", self.seed, 0, 2**64 - 1))


class Sampler:
    """Picks tokens; holds the state of the random numbers."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = numpy.random.default_rng(sampling.seed)

    def pick(self, logits: Logits, history: Sequence[int]) -> int:
        """The next token after `history`; logits that are not finite are an error."""
        if not math.isfinite(float(logits.max()) - float(logits.min())):  # both of them NaN where any logit is
            raise OtaroError("the model's logits are not finite: the packed weights are broken, see otaro verify")
        if self.sampling.temperature == 0:
            return int(self._penalized(logits, history).argmax())
        return self.draw(self.distribution(logits, history))

    def distribution(self, logits: Logits, history: Sequence[int]) -> Probabilities:
        """The probability of every token; all of it on one at temperature 0."""
        penalized = self._penalized(logits, history)
        if self.sampling.temperature == 0:
            certain = numpy.zeros(len(logits))
            certain[penalized.argmax()] = 1.0
            return certain
        behind = penalized.astype(numpy.float64) - float(penalized.max())
        with numpy.errstate(over="ignore"):  # next to no temperature: all but the likeliest are infinitely far behind
            weights = numpy.exp(behind / self.sampling.temperature)
        if 0 < self.sampling.top_k < len(weights):
            kept = numpy.argpartition(weights, -self.sampling.top_k)[-self.sampling.top_k :]
            mask = numpy.zeros(len(weights), dtype=bool)
            mask[kept] = True
            weights[~mask] = 0
        if self.sampling.top_p < 1:
            order = numpy.argsort(-weights, kind="stable")
            sums = numpy.cumsum(weights[order])
            count = int(numpy.searchsorted(sums, self.sampling.top_p * sums[-1])) + 1
            weights[order[count:]] = 0
        weights[weights < self.sampling.min_p * weights.max()] = 0
        return weights / weights.sum()

    def draw(self, probabilities: Probabilities) -> int:
        sums = numpy.cumsum(probabilities)
        return int(numpy.searchsorted(sums, self._random.random() * sums[-1], side="right"))

    def _penalized(self, logits: Logits, history: Sequence[int]) -> NDArray[numpy.floating[Any]]:
        penalty = self.sampling.repetition_penalty
        if penalty == 1 or not history:
            return logits
        seen = numpy.unique(numpy.array(history))
        penalized = logits.astype(numpy.float64)
        penalized[seen] = numpy.where(penalized[seen] > 0, penalized[seen] / penalty, penalized[seen] * penalty)
        return penalized
