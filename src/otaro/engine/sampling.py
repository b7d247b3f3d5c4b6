"""Picking the next token from logits.

The likeliest at temperature 0; above it a draw from the softmax of logits / temperature, after what is unlikely has
been taken out: all but the `top_k` likeliest, all beyond the fewest that together reach `top_p`, all below `min_p`
times the likeliest. A repetition penalty above 1 makes tokens that are there already less likely, in both cases.

Picking is done in native code (`csrc/sampling.cpp`). The random number for a token depends on the seed and on the
token's position alone, so a text with a seed is the same alone, in company and with drafts.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from otaro.engine.native import Logits, check, library
from otaro.engine.numbers import is_finite, shown, whole
from otaro.errors import OtaroError
from otaro.ops import cpu


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


class CSampling(ctypes.Structure):
    """The same for the native library."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
        ("top_k", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
    )


def c_sampling(sampling: Sampling) -> CSampling:
    """For one text: without a seed it is another one each time."""
    return CSampling(
        *(sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty, sampling.top_k),
        secrets.randbits(64) if sampling.seed is None else sampling.seed,
    )


def sample(
    sampling: CSampling,
    logits: Logits,
    history: Sequence[int] = (),
    *,
    position: int | None = None,
    top: int | None = None,
    isa: str | None = None,
) -> tuple[int, float | None, list[tuple[int, float]]]:
    """The token after `history`, and with `top` its log-probability and the likeliest tokens with theirs.

    `position` is the token's own, the length of `history` if left out. Texts that are run have their tokens picked in
    the same call (`Work.run`); this is for logits from elsewhere.
    """
    row = numpy.ascontiguousarray(logits, dtype=numpy.float32)
    before = numpy.array(history, dtype=numpy.int32)
    token, count = ctypes.c_int32(), -1 if top is None else top
    logprobs, tops = (ctypes.c_float * (1 + max(count, 0)))(), (ctypes.c_int32 * max(count, 1))()
    error = library().otaro_sample(
        *(ctypes.byref(sampling), row.ctypes.data, row.nbytes, len(row), before.ctypes.data, before.nbytes),
        *(len(before), len(before) if position is None else position, ctypes.byref(token), count),
        *(logprobs, ctypes.sizeof(logprobs), tops, ctypes.sizeof(tops), cpu.isa_number(isa)),
    )
    check(error)
    if top is None:
        return token.value, None, []
    return token.value, logprobs[0], list(zip(tops[:top], logprobs[1:], strict=True))
