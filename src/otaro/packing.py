"""Codes as bytes: a base of four bits per weight, one plane for each further bit, a byte of scale per group.

    base      the top 4 bits of every code (sign and three mantissa bits, or the top of an offset code): what E5M3
              reads. Two per byte, the earlier weight in the low half.
    bits[i]   bit i+4 of every code, counted from the top: E5M4 reads bits[0], E5M5 bits[0] and bits[1], and so on.
              Eight per byte, the earliest weight in the lowest bit.
    scale     the byte of every group.

Rows are padded to whole groups with the code of the weight 0. Leading dimensions stay as they are. In files and modules
a tensor NAME becomes NAME.sefp_base, NAME.sefp_bit4 … NAME.sefp_bit8 and NAME.sefp_scale; nobody else spells these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otaro.errors import PrecisionError
from otaro.precision import NARROWEST, WIDEST, Precision
from otaro.sefp import NESTED_OFFSET, Codes, Format, truncate

BASE, SCALE = "sefp_base", "sefp_scale"
BITS = {bit: f"sefp_bit{bit}" for bit in range(NARROWEST.mantissa + 1, WIDEST.mantissa + 1)}
"""The name of the plane that each bit beyond the base lies in."""
WIDTHS = {BASE: NARROWEST, SCALE: NARROWEST, **{name: Precision.from_mantissa(bit) for bit, name in BITS.items()}}
"""The narrowest codes that each plane is a part of."""


@dataclass(frozen=True)
class Planes:
    """The packed bytes of one tensor, up to some width."""

    base: Tensor
    bits: tuple[Tensor, ...]
    scale: Tensor

    @property
    def stored(self) -> Precision:
        """The widest codes these planes hold."""
        return Precision.from_mantissa(NARROWEST.mantissa + len(self.bits))

    def named(self) -> dict[str, Tensor]:
        """The planes by their names in files and modules."""
        return {BASE: self.base, SCALE: self.scale, **dict(zip(BITS.values(), self.bits, strict=False))}

    @classmethod
    def from_named(cls, tensors: Mapping[str, Tensor]) -> Planes:
        """The planes among tensors of such names."""
        return cls(tensors[BASE], tuple(tensors[name] for name in BITS.values() if name in tensors), tensors[SCALE])

    def up_to(self, precision: Precision) -> Planes:
        """The planes of codes of that width, or of all that is here if it is less."""
        return Planes(self.base, self.bits[: precision.mantissa - NARROWEST.mantissa], self.scale)


def plane_key(tensor: str, plane: str) -> str:
    """What a plane of a tensor is called in files and models."""
    return f"{tensor}.{plane}"


def split_key(key: str) -> tuple[str, str]:
    """The tensor and the plane of a key."""
    tensor, _, plane = key.rpartition(".")
    return tensor, plane


def padded_columns(columns: int, format: Format) -> int:
    return format.groups(columns) * format.group_size


def plane_shapes(shape: tuple[int, ...], format: Format) -> dict[str, tuple[int, ...]]:
    """The shape of each plane of a tensor, by name."""
    *leading, columns = shape
    padded = padded_columns(columns, format)
    bits = dict.fromkeys(BITS.values(), (*leading, padded // 8))
    return {BASE: (*leading, padded // 2), SCALE: (*leading, format.groups(columns)), **bits}


def pack(codes: Codes) -> Planes:
    """The planes of codes at their width."""
    columns = codes.code.shape[-1]
    mantissa = codes.precision.mantissa
    zero = NESTED_OFFSET >> (WIDEST.mantissa - mantissa) if codes.format.scheme == "nested" else 0
    missing = padded_columns(columns, codes.format) - columns
    code = torch.nn.functional.pad(codes.code, (0, missing), value=zero)
    base = (code >> (mantissa - NARROWEST.mantissa)).to(torch.uint8)
    bits = tuple(pack_bits((code >> (mantissa - bit)) & 1) for bit in BITS if bit <= mantissa)
    return Planes(base[..., 0::2] | base[..., 1::2] << 4, bits, codes.scale)


def unpack(planes: Planes, columns: int, precision: Precision, format: Format) -> Codes:
    """The codes at a width, from the planes that width needs."""
    stored = format.stored(precision)
    if stored > planes.stored:
        raise PrecisionError(f"precision {precision} needs the bits of {stored}, only {planes.stored} is here")
    code = torch.stack((planes.base & 15, planes.base >> 4), -1).flatten(-2).to(torch.int16)
    for plane in planes.up_to(stored).bits:
        code = code << 1 | unpack_bits(plane)
    return truncate(Codes(code[..., :columns].contiguous(), planes.scale, stored, format), precision)


def unpack_rows(planes: Planes, rows: Tensor, columns: int, precision: Precision, format: Format) -> Codes:
    """The codes of some rows of a packed matrix, in the order asked for."""
    needed = planes.up_to(format.stored(precision))
    picked = Planes(needed.base[rows], tuple(plane[rows] for plane in needed.bits), needed.scale[rows])
    return unpack(picked, columns, precision, format)


def pack_bits(bits: Tensor) -> Tensor:
    """[..., 8n] bits as [..., n] bytes."""
    eights = bits.to(torch.uint8).unflatten(-1, (-1, 8))
    result = eights[..., 0].clone()
    for bit in range(1, 8):
        result |= eights[..., bit] << bit
    return result


def unpack_bits(plane: Tensor) -> Tensor:
    """[..., n] bytes as [..., 8n] bits of int16."""
    return torch.stack([(plane >> bit) & 1 for bit in range(8)], -1).flatten(-2).to(torch.int16)
