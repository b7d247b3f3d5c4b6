"""Planes in fragment order: the bytes of the files, re-laid once so that a warp's loads are what the tensor cores take.

    base    [tiles, units, 2048] bytes, of which a unit is 16 rows × 256 columns     tiles = rows / 16, rounded up
    bits    [tiles, units, 512] each                                                  units = columns / 256, rounded up
    scale   [tiles, units, 64]

`planes.cuh` says where in a unit each weight lies. Rows of all leading dimensions are one matrix here. What fills the
last tile and unit has scale 0 and counts for nothing. Groups of 128 and 256 have their scale repeated for every 64
columns. Plain torch on any device; :func:`to_planes` is the exact inverse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from otaro.packing import BASE, SCALE, Planes, padded_columns
from otaro.precision import NARROWEST, Precision
from otaro.sefp import Format

ROWS, COLUMNS, GROUP = 16, 256, 64
"""Rows and columns of a unit, and columns that share a scale in it."""
_CHUNK = 1 << 24
"""Weights re-laid at a time: temporaries stay small beside the model."""


@dataclass(frozen=True)
class Fragments:
    """The packed bytes of one tensor in fragment order, up to some width."""

    base: Tensor
    bits: tuple[Tensor, ...]
    scale: Tensor
    shape: tuple[int, ...]
    group_size: int

    @property
    def stored(self) -> Precision:
        """The widest codes these planes hold."""
        return Precision.from_mantissa(NARROWEST.mantissa + len(self.bits))

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1]


def supports(format: Format) -> bool:
    """Whether weights of a format can lie in fragment order."""
    return format.scheme == "nested" and format.group_size % GROUP == 0


def from_planes(planes: Planes, shape: tuple[int, ...], format: Format) -> Fragments:
    """The planes of a tensor of that shape, re-laid."""
    laid = {name: fragments(name, plane, format) for name, plane in planes.named().items()}
    held = Planes.from_named(laid)
    return Fragments(held.base, held.bits, held.scale, shape, format.group_size)


def fragments(name: str, plane: Tensor, format: Format) -> Tensor:
    """The plane of a name, [..., rows, bytes], in fragment order."""
    if name == SCALE:
        return _scale_units(plane, format)
    return _relaid(_base_units, plane, 2) if name == BASE else _relaid(_bit_units, plane, 8)


def to_planes(fragments: Fragments, format: Format) -> Planes:
    """The planes as they lie in files."""
    *leading, columns = fragments.shape
    padded = padded_columns(columns, format)
    rows = fragments.rows

    def whole(plane: Tensor, width: int) -> Tensor:
        return plane[:rows, :width].reshape(*leading, width).contiguous()

    base = whole(_in_rows(_base_rows, fragments.base), padded // 2)
    bits = tuple(whole(_in_rows(_bit_rows, plane), padded // 8) for plane in fragments.bits)
    repeated = format.group_size // GROUP
    scale = fragments.scale.unflatten(-1, (8, 4, 2)).permute(0, 4, 2, 1, 3).flatten(3).flatten(0, 2)
    return Planes(base, bits, whole(scale[:, ::repeated], format.groups(columns)))


def _scale_units(scale: Tensor, format: Format) -> Tensor:
    repeated = scale.flatten(0, -2).repeat_interleave(format.group_size // GROUP, dim=-1)
    units = _padded(repeated, ROWS, COLUMNS // GROUP).unflatten(0, (-1, 2, 8)).unflatten(-1, (-1, 4))
    return units.permute(0, 3, 2, 4, 1).flatten(2).contiguous()  # tile, half, row, unit, group


# A code's place in a word, h the lower row, i the pair, e the second column of it, s the step.
_BASE_PLACES = [(h, i, e, 6 - 4 * i + 8 * h + 16 * e) for h in (0, 1) for i in (0, 1) for e in (0, 1)]
_BIT_PLACES = [(h, s, i, e, (place + s) % 32) for h, i, e, place in _BASE_PLACES for s in range(4)]


def _base_units(rows: Tensor) -> Tensor:
    nibbles = torch.stack((rows & 15, rows >> 4), -1).flatten(1).int()
    codes = nibbles.unflatten(0, (-1, 2, 8)).unflatten(-1, (-1, 4, 4, 4, 2, 2))  # tile h row | unit g s lane i e
    words = torch.zeros_like(codes[:, 0, ..., 0, 0])  # tile row unit g s lane
    for h, i, e, place in _BASE_PLACES:
        words |= _rotated(codes[:, h, ..., i, e], place)
    return _bytes(words.permute(0, 2, 3, 1, 5, 4))  # tile unit g row lane s


def _base_rows(units: Tensor) -> Tensor:
    words = _words(units, (4, 8, 4, 4)).permute(0, 3, 1, 2, 5, 4)  # tile row unit g s lane
    codes = words.new_empty((words.shape[0], 2, *words.shape[1:], 2, 2), dtype=torch.uint8)
    for h, i, e, place in _BASE_PLACES:
        codes[:, h, ..., i, e] = _rotated(words, 32 - place) & 15
    nibbles = codes.flatten(3).flatten(0, 2)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def _bit_units(rows: Tensor) -> Tensor:
    bits = torch.stack([(rows >> bit) & 1 for bit in range(8)], -1).flatten(1).int()
    codes = bits.unflatten(0, (-1, 2, 8)).unflatten(-1, (-1, 4, 4, 4, 2, 2))  # tile h row | unit g s lane i e
    words = torch.zeros_like(codes[:, 0, :, :, :, 0, :, 0, 0])  # tile row unit g lane
    for h, s, i, e, place in _BIT_PLACES:
        words |= codes[:, h, :, :, :, s, :, i, e] << place
    return _bytes(words.permute(0, 2, 1, 4, 3))  # tile unit row lane g


def _bit_rows(units: Tensor) -> Tensor:
    words = _words(units, (8, 4, 4)).permute(0, 2, 1, 4, 3)  # tile row unit g lane
    tiles, rows, count, groups, lanes = words.shape
    codes = words.new_empty((tiles, 2, rows, count, groups, 4, lanes, 2, 2), dtype=torch.uint8)
    for h, s, i, e, place in _BIT_PLACES:
        codes[:, h, :, :, :, s, :, i, e] = (words >> place) & 1
    eights = codes.flatten(3).flatten(0, 2).unflatten(-1, (-1, 8))
    result = eights[..., 0].clone()
    for bit in range(1, 8):
        result |= eights[..., bit] << bit
    return result


def _rotated(words: Tensor, count: int) -> Tensor:
    """Words of 32 bits rotated to the left; of the bits that come around, at most 4 count."""
    if count in (0, 32):
        return words
    return words << count | (words >> (32 - count) & ((1 << count) - 1))


def _relaid(lay: Callable[[Tensor], Tensor], plane: Tensor, weights: int) -> Tensor:
    """A plane with so many weights in a byte, some tiles at a time; each of them padded to whole units."""
    rows = plane.flatten(0, -2)
    tiles = max(_CHUNK // (rows.shape[1] * weights * ROWS), 1)
    return torch.cat([lay(_padded(chunk, ROWS, COLUMNS // weights)) for chunk in rows.split(tiles * ROWS)])


def _in_rows(lay: Callable[[Tensor], Tensor], units: Tensor) -> Tensor:
    tiles = max(_CHUNK // (units.shape[1] * COLUMNS * ROWS), 1)
    return torch.cat([lay(chunk) for chunk in units.split(tiles)])


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))


def _bytes(words: Tensor) -> Tensor:
    """[tiles, units, ...] words as bytes, the lowest first."""
    return words.contiguous().flatten(2).view(torch.uint8)


def _words(units: Tensor, inner: tuple[int, ...]) -> Tensor:
    return units.contiguous().view(torch.int32).unflatten(-1, inner)
