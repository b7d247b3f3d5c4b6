"""Texts on a device: keys and values of each in memory of its own, and the rows of a run that point to them.

A text's memory is [layers, key or value, key heads, capacity, row], grown as the text grows. A row is a head's
dimensions, or with a cache of SEFP codes their bytes: nibbles, a plane for each further bit, a byte of scale for each
64 dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from otaro.engine.cuda.model import DeviceModel
from otaro.engine.native import NO_MEMORY_CODE, check
from otaro.engine.session import AnySession
from otaro.precision import NARROWEST, Precision

BLOCK = 64
"""Tokens that memory grows by at least."""
_marks = itertools.count()


@dataclass(frozen=True)
class CacheLayout:
    """How a row of keys or values lies in memory."""

    dimension: int
    precision: Precision | None

    @property
    def padded(self) -> int:
        """Dimensions of a row of codes: whole bytes of every plane."""
        return -(-self.dimension // 8) * 8

    @property
    def mantissa(self) -> int:
        return 0 if self.precision is None else self.precision.mantissa

    @property
    def row(self) -> int:
        """Elements of a row: numbers, or bytes of codes."""
        if self.precision is None:
            return self.dimension
        planes = self.precision.mantissa - NARROWEST.mantissa
        return self.padded // 2 + planes * (self.padded // 8) + -(-self.dimension // 64)


class DeviceSession(AnySession):
    """Keys and values of one text in the memory of a device."""

    def __init__(self, model: DeviceModel, context: int, *, cache: Precision | None = None) -> None:
        super().__init__(model, context)
        self.model = model
        self.layout = CacheLayout(model.shape.head_dimension, cache)
        self.tokens = numpy.zeros(0, dtype=numpy.int32)
        """The text itself, for penalties on what is there already."""
        self.cache = self._room(0)
        self.mark = next(_marks)
        """Another number for every text, and after every change to it that is not a run."""

    def _room(self, capacity: int) -> Tensor:
        shape = self.shape
        dtype = self.model.dtype if self.layout.precision is None else torch.uint8
        sizes = (shape.layers, 2, shape.kv_heads, capacity, self.layout.row)
        # Not left as it is found: what is masked is multiplied by zero, and NaN times zero is NaN.
        return torch.zeros(sizes, dtype=dtype, device=self.model.device)

    @property
    def capacity(self) -> int:
        """Tokens that there is room for now."""
        return self.cache.shape[3]

    @property
    def nbytes(self) -> tuple[int, int]:
        full = self.cache.element_size() * 2 * self.shape.layers * self.shape.kv_heads * self.layout.row
        return self.cache.nbytes, full * _rounded(self.context)

    def expect(self, length: int) -> None:
        """Take all the memory that a text of that length needs at once, or give back what is far beyond it."""
        with suppress(torch.OutOfMemoryError):  # it may end before all of it is needed
            super().expect(length)
            self.reserve(length)

    def reserve(self, length: int) -> None:
        """Have room for so many tokens; those that are held stay."""
        if length > self.capacity:
            grown = length if self.capacity == 0 else max(length, min(2 * self.capacity, self.context))
            self._move(_rounded(grown))

    def claim(self, length: int) -> None:
        """`reserve`, or an error in a sentence."""
        try:
            self.reserve(length)
        except torch.OutOfMemoryError:
            check(NO_MEMORY_CODE)

    def _move(self, capacity: int) -> None:
        old, kept = self.cache, min(self.length, capacity)
        self.cache = self._room(capacity)
        self.cache[:, :, :, :kept] = old[:, :, :, :kept]
        self.tokens = numpy.resize(self.tokens, capacity)
        self.mark = next(_marks)

    def _release(self, length: int) -> None:
        if _rounded(length) < self.capacity:
            self.length = min(self.length, length)
            self._move(_rounded(length))

    def _copy(self, other: DeviceSession, length: int) -> None:
        self.claim(length)
        self.cache[:, :, :, :length] = other.cache[:, :, :, :length]
        self.tokens[:length] = other.tokens[:length]
        self.mark = next(_marks)


def _rounded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


@dataclass(frozen=True)
class Rows:
    """What is run together: a token of a text each, on the device. A row at position -1 is not there."""

    tokens: Tensor
    positions: Tensor
    places: Tensor
    """[2, rows]: the address of each row's cache, and how many tokens it has room for."""
    sessions: Sequence[DeviceSession | None]
    """For plain torch, which cannot follow addresses."""
    layout: CacheLayout
    stretches: int = 1
    """Stretches of keys that the longest text may have."""
