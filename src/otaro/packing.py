"""Codes as bytes: a base of four bits per weight, one plane for each further bit, 5-bit exponents.

    base      the top 4 bits of every code (sign and three mantissa bits, or the top of an offset code): what E5M3
              reads. Two per byte, the earlier weight in the low half.
    bits[i]   bit i+4 of every code, counted from the top: E5M4 reads bits[0], E5M5 bits[0] and bits[1], and so on.
              Eight per byte, the earliest weight in the lowest bit.
    exponent  5 bits per group, one stream over the whole tensor: entry i occupies stream bits 5i to 5i+4, stream bit
              j being bit j % 8 of byte j // 8. The last byte is filled with zeros.
    polarity  one bit per group as such a stream, only where the format uses it.

Rows are padded to whole groups with the code of the weight 0. Leading dimensions stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otaro.errors import PrecisionError
from otaro.precision import NARROWEST, WIDEST, Precision
from otaro.sefp import NESTED_OFFSET, Codes, Format, truncate

EXPONENT_BITS = 5


@dataclass(frozen=True)
class Planes:
    """The packed bytes of one tensor, up to some width."""

    base: Tensor
    bits: tuple[Tensor, ...]
    exponent: Tensor
    polarity: Tensor | None

    @property
    def precision(self) -> Precision:
        """The widest codes these planes hold."""
        return Precision.from_mantissa(NARROWEST.mantissa + len(self.bits))


def padded_columns(columns: int, format: Format) -> int:
    return format.groups(columns) * format.group_size


def plane_shapes(shape: tuple[int, ...], format: Format) -> dict[str, tuple[int, ...]]:
    """The shapes of `base`, each of `bits`, `exponent` and `polarity` for a tensor of that shape."""
    *leading, columns = shape
    padded = padded_columns(columns, format)
    groups = format.groups(columns)
    for size in leading:
        groups *= size
    return {
        "base": (*leading, padded // 2),
        "bit": (*leading, padded // 8),
        "exponent": (stream_bytes(groups, EXPONENT_BITS),),
        "polarity": (stream_bytes(groups, 1),),
    }


def stream_bytes(entries: int, width: int) -> int:
    return -(-entries * width // 8)


def pack(codes: Codes) -> Planes:
    """The planes of codes at their width."""
    columns = codes.code.shape[-1]
    mantissa = codes.precision.mantissa
    zero = NESTED_OFFSET >> (WIDEST.mantissa - mantissa) if codes.format.scheme == "nested" else 0
    missing = padded_columns(columns, codes.format) - columns
    code = torch.nn.functional.pad(codes.code, (0, missing), value=zero)
    base = (code >> (mantissa - NARROWEST.mantissa)).to(torch.uint8)
    bits = tuple(
        pack_stream((code >> (mantissa - bit)) & 1, 1, over_rows=True)
        for bit in range(NARROWEST.mantissa + 1, mantissa + 1)
    )
    return Planes(
        base[..., 0::2] | base[..., 1::2] << 4,
        bits,
        pack_stream(codes.exponent, EXPONENT_BITS),
        None if codes.polarity is None else pack_stream(codes.polarity, 1),
    )


def unpack(planes: Planes, columns: int, precision: Precision, format: Format) -> Codes:
    """The codes at a width, from the planes that width needs."""
    stored = format.stored(precision)
    if stored > planes.precision:
        raise PrecisionError(f"precision {precision} needs the bits of {stored}, only {planes.precision} is here")
    code = torch.stack((planes.base & 15, planes.base >> 4), -1).flatten(-2).to(torch.int16)
    for plane in planes.bits[: stored.mantissa - NARROWEST.mantissa]:
        code = code << 1 | unpack_bits(plane)
    shape = (*planes.base.shape[:-1], format.groups(columns))
    groups = 1
    for size in shape:
        groups *= size
    exponent = unpack_stream(planes.exponent, torch.arange(groups, device=code.device), EXPONENT_BITS)
    polarity = None
    if planes.polarity is not None:
        polarity = unpack_stream(planes.polarity, torch.arange(groups, device=code.device), 1).view(shape).bool()
    codes = Codes(code[..., :columns].contiguous(), exponent.view(shape), polarity, stored, format)
    return truncate(codes, precision)


def unpack_rows(planes: Planes, rows: Tensor, columns: int, precision: Precision, format: Format) -> Codes:
    """The codes of some rows of a packed matrix, in the order asked for."""
    groups = format.groups(columns)
    entries = (rows[:, None] * groups + torch.arange(groups, device=rows.device)).flatten()
    picked = Planes(
        planes.base[rows],
        tuple(plane[rows] for plane in planes.bits[: format.stored(precision).mantissa - NARROWEST.mantissa]),
        pack_stream(unpack_stream(planes.exponent, entries, EXPONENT_BITS), EXPONENT_BITS),
        None if planes.polarity is None else pack_stream(unpack_stream(planes.polarity, entries, 1), 1),
    )
    return unpack(picked, columns, precision, format)


def pack_stream(values: Tensor, width: int, *, over_rows: bool = False) -> Tensor:
    """Values of `width` bits as a stream of bytes; `over_rows` makes a stream of each row (whole bytes only)."""
    values = values.to(torch.uint8)
    leading = values.shape[:-1] if over_rows else ()
    bits = torch.stack([(values >> bit) & 1 for bit in range(width)], -1).reshape(*leading, -1)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 8)).unflatten(-1, (-1, 8))
    result = bits[..., 0].clone()
    for bit in range(1, 8):
        result |= bits[..., bit] << bit
    return result


def unpack_bits(plane: Tensor) -> Tensor:
    """[..., n] bytes as [..., 8n] bits of int16."""
    return torch.stack([(plane >> bit) & 1 for bit in range(8)], -1).flatten(-2).to(torch.int16)


def unpack_stream(stream: Tensor, entries: Tensor, width: int) -> Tensor:
    """The values at those positions of a stream of `width`-bit values."""
    position = entries * width
    padded = torch.nn.functional.pad(stream, (0, 1)).to(torch.int32)
    byte = position // 8
    pair = padded[byte] | padded[byte + 1] << 8
    return ((pair >> (position % 8)) & (2**width - 1)).to(torch.uint8)
