"""Texts on a device: keys and values of each in memory of its own, and the rows of a run that point to them.

A text's memory is [layers, key or value, key heads], grown as the text grows: of a head one row after the other, each
its dimensions, or with a cache of SEFP codes their bits. Behind all rows of codes lie their scales, a byte for each 64
dimensions, so that rows begin where vectors can be loaded.
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
from otaro.precision import Precision

BLOCK = 64
"""Tokens that memory grows by at least."""
_marks = itertools.count()


@dataclass(frozen=True)
class CacheLayout:
    """How a row of keys or values lies in memory.

    Codes are cut into fields of 8, 4, 2 or 1 bits, the upper bits first; the fields of a size are a plane. Dimensions
    8w … 8w + 7 make word w of a plane, and a word's lower half holds 8w, 8w + 2, 8w + 4, 8w + 6, from the lowest bits
    on, its upper half the odd ones: both halves become half floats at once. Fields of 8 bits have room for half of
    this, so there is a first plane of words for the first four dimensions and another for the rest. Words come in four
    parts, w = 0, 4, 8 …, then 1, 5, 9 … and so on, one for each of four threads; a thread's vector has what tensor
    cores want of it.
    """

    dimension: int
    precision: Precision | None

    @property
    def padded(self) -> int:
        """Dimensions of a row of codes: whole words, as many in each part."""
        return -(-self.dimension // 32) * 32

    @property
    def mantissa(self) -> int:
        return 0 if self.precision is None else self.precision.mantissa

    @property
    def row(self) -> int:
        """Elements of a row: numbers, or bytes of codes."""
        return self.dimension if self.precision is None else self.padded // 8 * (self.mantissa + 1)

    @property
    def scales(self) -> int:
        """Bytes of scale of a row."""
        return 0 if self.precision is None else -(-self.dimension // 64)

    @property
    def fields(self) -> tuple[int, ...]:
        """Bits of a code in each plane."""
        bits = self.mantissa + 1
        return tuple(field for field in (8, 4, 2, 1) if bits & field)


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
        sizes = (shape.layers, 2, shape.kv_heads, capacity * (self.layout.row + self.layout.scales))
        # Not left as it is found: what is masked is multiplied by zero, and NaN times zero is NaN.
        return torch.zeros(sizes, dtype=dtype, device=self.model.device)

    @property
    def capacity(self) -> int:
        """Tokens that there is room for now."""
        return self.cache.shape[3] // (self.layout.row + self.layout.scales)

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Rows and their scales, both [layers, key or value, key heads, capacity, elements]."""
        capacity, row, scales = self.capacity, self.layout.row, self.layout.scales
        rows, behind = self.cache.split((capacity * row, capacity * scales), -1)
        return rows.unflatten(-1, (capacity, row)), behind.unflatten(-1, (capacity, scales))

    @property
    def nbytes(self) -> tuple[int, int]:
        row = self.cache.element_size() * (self.layout.row + self.layout.scales)
        return self.cache.nbytes, 2 * self.shape.layers * self.shape.kv_heads * row * _rounded(self.context)

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
        old, kept = self.parts, min(self.length, capacity)
        self.cache = self._room(capacity)
        self._take(old, kept)
        self.tokens = numpy.resize(self.tokens, capacity)
        self.mark = next(_marks)

    def _take(self, parts: tuple[Tensor, Tensor], length: int) -> None:
        for own, part in zip(self.parts, parts, strict=True):
            own[:, :, :, :length] = part[:, :, :, :length]

    def _release(self, length: int) -> None:
        if _rounded(length) < self.capacity:
            self.length = min(self.length, length)
            self._move(_rounded(length))

    def _copy(self, other: DeviceSession, length: int) -> None:
        self.claim(length)
        self._take(other.parts, length)
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
