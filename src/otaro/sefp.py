"""SEFP, shared exponent floating point: the number format, in plain torch.

A matrix is cut into groups of 64 consecutive weights along its last dimension (the input dimension of a linear layer).
A group stores one exponent and each weight a short code; there are no scaling factors. With

    E   = floor(log2(max |w|)) over the group, clamped to [-14, 15], stored as the field E + 15 (0: an all-zero group)
    s_m = 2^(E+1-m), the step at a width of m mantissa bits,

every weight lies in (-2^(E+1), 2^(E+1)), which is 2^m steps to either side, so a code has 1 + m bits and a weight
costs 1 + m + 5/64 bits (6/64 with polarity). Three ways to choose the code:

``truncate``  sign and q = floor(|w| / s_m), value ±q·s_m. Cutting the last bit of q gives the next width exactly, but
              every weight shrinks and the cell around zero is twice as wide as the others.
``nearest``   sign and q = round(|w| / s_m), ties to even, at most 2^m - 1. The best each width can do alone. A
              narrower width is a *rounded* slice of a wider one, so it needs one bit more than it keeps.
``nested``    the default: u = floor(w / s_8) + 272, clamped to [32, 511], an offset-binary code of 9 bits, cut as
              u_m = u >> (8-m), value (u_m + bias_m)·s_m with bias_m = 0.5 - 8.5·2^(m-3). The 272 is 256 for the
              offset plus 16, half a step of M3: at M3 the cut rounds to nearest with a true zero, and each further
              bit halves the cell. The decode is one multiply and one add, the same for a whole group.

Two refinements belong to ``nested``. They act in the encoder; the decode stays affine and a width a prefix of the bits:

polarity            a bit per group. The group is negated where that makes its largest weight negative, where the code
                    reaches 8 steps of M3 instead of 7.5; the clamp opens to [16, 511].
exponent_by_error   E or E-1, whichever leaves the smaller squared error over the group at the width named (E5M5).
                    The error is counted in whole 1/256ths of s_8, so that every implementation decides alike.

Training may give narrow widths weights of their own (see :mod:`otaro.tune.tiers`): `tiers` are then such weights, each
with the width down to which it decides the bits. A tier decides within the cell that the narrower ones chose, so that
all of them are still prefixes of one code; exponent and polarity come from the weight itself.

Every fast path is tested against this file bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from otaro.errors import FormatError, WeightError
from otaro.precision import WIDEST, Precision

Scheme = Literal["truncate", "nearest", "nested"]
Tiers = Sequence[tuple[Precision, Tensor]]
"""Weights that decide the bits down to a width, the narrowest first."""
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
BY_SCHEME: Any = "by scheme"
"""A refinement as the scheme has it: ``nested`` has both, with the exponent by the error at E5M5; the others none."""
GROUP_SIZES = (32, 64, 128, 256)
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

EXPONENT_MIN, EXPONENT_MAX, EXPONENT_OFFSET = -14, 15, 15
NESTED_OFFSET = 272
NESTED_MIN, NESTED_MIN_POLARITY, NESTED_MAX = 32, 16, 511
ERROR_LIMIT = 2**20


@dataclass(frozen=True)
class Format:
    """The settings of the format; what a packed folder records.

    `exponent_by_error` may be given by name, and as ``none`` for the exponent of a group's largest weight.
    """

    scheme: Scheme = "nested"
    group_size: int = 64
    polarity: bool = BY_SCHEME
    exponent_by_error: Precision | None = BY_SCHEME

    def __post_init__(self) -> None:
        refined = self.scheme == "nested"
        polarity: Any = refined if self.polarity == BY_SCHEME else self.polarity
        by_error: Any = self.exponent_by_error
        if by_error == BY_SCHEME:
            by_error = Precision.E5M5 if refined else None
        elif isinstance(by_error, str):
            by_error = None if by_error == "none" else Precision(by_error)
        object.__setattr__(self, "polarity", polarity)
        object.__setattr__(self, "exponent_by_error", by_error)
        if self.scheme not in SCHEMES:
            raise FormatError(f"unknown scheme {self.scheme!r}: choose one of {', '.join(SCHEMES)}")
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            raise FormatError(f"group size {self.group_size} is not one of {', '.join(map(str, GROUP_SIZES))}")
        if self.scheme != "nested" and (self.polarity or self.exponent_by_error is not None):
            raise FormatError(f"polarity and exponent_by_error refine the scheme 'nested', not {self.scheme!r}")

    def groups(self, columns: int) -> int:
        """Groups in a row of that many weights, the last one possibly short."""
        return -(-columns // self.group_size)

    def stored(self, precision: Precision) -> Precision:
        """The width whose bits must be at hand to decode at `precision`."""
        if self.scheme == "nearest" and precision < WIDEST:
            return Precision.from_mantissa(precision.mantissa + 1)
        return precision


@dataclass(frozen=True)
class Codes:
    """A tensor in codes: `code` has the tensor's shape, `exponent` and `polarity` one entry per group of a row."""

    code: Tensor
    exponent: Tensor
    polarity: Tensor | None
    precision: Precision
    format: Format


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float32, exact on every device, for exponents of normal numbers."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def step(exponent: Tensor, precision: Precision) -> Tensor:
    """The distance between two neighbouring values at that width, from the stored exponent field; 0 in a zero group."""
    size = power_of_two(exponent.to(torch.int32) - EXPONENT_OFFSET + 1 - precision.mantissa)
    return torch.where(exponent == 0, torch.zeros_like(size), size)


def nested_bias(precision: Precision) -> float:
    """What is added to a ``nested`` code before it is multiplied by the step."""
    return 0.5 - 8.5 * 2 ** (precision.mantissa - 3)


def check_weight(weight: Tensor, name: str = "the tensor") -> None:
    """Refuse what cannot be encoded, naming the tensor and the first bad position."""
    if weight.dtype not in WEIGHT_DTYPES:
        raise WeightError(f"{name} is {weight.dtype}: only float32, float16 and bfloat16 weights can be encoded")
    if weight.dim() == 0 or weight.numel() == 0:
        raise WeightError(f"{name} of shape {list(weight.shape)} holds no row of weights to encode")
    finite = torch.isfinite(weight)
    if not bool(finite.all()):
        index = int((~finite).flatten().int().argmax())
        raise not_finite(weight, index, name)


def not_finite(weight: Tensor, index: int, name: str = "the tensor") -> WeightError:
    """The error for a NaN or infinity at a flat position."""
    position: list[int] = []
    rest = index
    for size in reversed(weight.shape):
        position.insert(0, rest % size)
        rest //= size
    value = float(weight.flatten()[index])
    return WeightError(f"{name} holds {value} at {position}: weights must be finite")


def group_exponents(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Exponent fields of all groups, and the unclamped exponents they come from (both [..., groups]).

    A group whose largest weight is a subnormal float32 has the exponent -127.
    """
    largest = in_groups(weight.float().abs(), group_size).amax(-1)
    # A subnormal reads as -127, far below the clamp, so its true exponent does not matter.
    exponent = (largest.view(torch.int32) >> 23) - 127
    field = exponent.clamp(EXPONENT_MIN, EXPONENT_MAX) + EXPONENT_OFFSET
    return torch.where(largest == 0, torch.zeros_like(field), field).to(torch.uint8), exponent


def encode(weight: Tensor, precision: Precision = WIDEST, format: Format = Format()) -> Codes:
    """The codes of a tensor at a width; ``truncate`` and ``nested`` give the same as cutting its E5M8 codes."""
    check_weight(weight)
    return encode_unchecked(weight, precision, format)


def encode_unchecked(weight: Tensor, precision: Precision, format: Format, tiers: Tiers = ()) -> Codes:
    """`encode` for weights known to be finite: no synchronisation with the device."""
    columns = weight.shape[-1]
    grouped = in_groups(weight.float(), format.group_size)
    field, _ = group_exponents(weight, format.group_size)
    if format.scheme != "nested":
        limit = 2**precision.mantissa - 1
        scaled = grouped.abs() * _inverse_step(field, precision)
        magnitude = torch.floor(scaled) if format.scheme == "truncate" else torch.round(scaled)
        code = magnitude.clamp(max=limit).to(torch.int16) | (grouped < 0).to(torch.int16) << precision.mantissa
        return Codes(_out_of_groups(code, columns), field, None, precision, format)

    polarity = None
    if format.polarity:
        polarity = grouped.amax(-1) > -grouped.amin(-1)
        grouped = torch.where(polarity[..., None], -grouped, grouped)
    if format.exponent_by_error is not None:
        lowered = (field.to(torch.int16) - 1).clamp(min=0).to(torch.uint8)
        own = in_groups(torch.ones(columns, dtype=torch.bool, device=weight.device), format.group_size)
        error = _squared_error(grouped, own, field, field, format)
        better = (_squared_error(grouped, own, field, lowered, format) < error) & (lowered > 0)
        field = torch.where(better, lowered, field)
    code = _tiered_code(grouped, field, polarity, precision, format, tiers)
    return Codes(
        _out_of_groups(code >> (WIDEST.mantissa - precision.mantissa), columns), field, polarity, precision, format
    )


def truncate(codes: Codes, precision: Precision) -> Codes:
    """Codes at a narrower width: the mantissa bits on the right are cut off (``nearest`` rounds them away)."""
    if precision > codes.precision:
        raise FormatError(f"codes of {codes.precision} cannot be widened to {precision}")
    dropped = codes.precision.mantissa - precision.mantissa
    if codes.format.scheme == "nearest" and dropped:
        magnitude = codes.code & (2**codes.precision.mantissa - 1)
        magnitude = ((magnitude + 2 ** (dropped - 1)) >> dropped).clamp(max=2**precision.mantissa - 1)
        code = (codes.code >> codes.precision.mantissa) << precision.mantissa | magnitude
    else:
        code = codes.code >> dropped
    return Codes(code, codes.exponent, codes.polarity, precision, codes.format)


def decode(codes: Codes, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values the codes stand for. All are exact in float32 and float16; bfloat16 rounds ``nested`` at E5M8."""
    columns = codes.code.shape[-1]
    code = in_groups(codes.code, codes.format.group_size)
    size = step(codes.exponent, codes.precision)[..., None]
    if codes.format.scheme == "nested":
        value = (code.float() + nested_bias(codes.precision)) * size
        negative = None if codes.polarity is None else codes.polarity[..., None]
    else:
        value = (code & (2**codes.precision.mantissa - 1)).float() * size
        negative = code >> codes.precision.mantissa != 0
    if negative is not None:
        value = torch.where(negative, -value, value)
    return _out_of_groups(value, columns).to(dtype)


def in_groups(tensor: Tensor, group_size: int) -> Tensor:
    """[..., columns] as [..., groups, group_size], a short last group filled with zeros."""
    missing = -tensor.shape[-1] % group_size
    if missing:
        tensor = torch.nn.functional.pad(tensor, (0, missing))
    return tensor.unflatten(-1, (-1, group_size))


def _out_of_groups(tensor: Tensor, columns: int) -> Tensor:
    return tensor.flatten(-2)[..., :columns].contiguous()


def _inverse_step(field: Tensor, precision: Precision) -> Tensor:
    return power_of_two(precision.mantissa - 1 + EXPONENT_OFFSET - field.to(torch.int32))[..., None]


def _nested_code(grouped: Tensor, field: Tensor, format: Format) -> Tensor:
    scaled = grouped * _inverse_step(field, WIDEST)
    # A product that underflows to zero still lies below zero if the weight does.
    cell = torch.where((grouped < 0) & (scaled == 0), -torch.ones_like(scaled), torch.floor(scaled))
    low = NESTED_MIN_POLARITY if format.polarity else NESTED_MIN
    return (cell + NESTED_OFFSET).clamp(low, NESTED_MAX).to(torch.int16)


def _tiered_code(
    grouped: Tensor, field: Tensor, polarity: Tensor | None, precision: Precision, format: Format, tiers: Tiers
) -> Tensor:
    """E5M8 codes of which the bits down to `precision` are decided."""
    code: Tensor | None = None
    dropped = 0
    for width, tier in tiers:
        signed = in_groups(tier.float(), format.group_size)
        if polarity is not None:
            signed = torch.where(polarity[..., None], -signed, signed)
        code = _within(_nested_code(signed, field, format), code, dropped)
        if width >= precision:
            return code
        dropped = WIDEST.mantissa - width.mantissa
    return _within(_nested_code(grouped, field, format), code, dropped)


def _within(code: Tensor, narrower: Tensor | None, dropped: int) -> Tensor:
    """The code nearest to `code` in the cell of `narrower`: alike but for the bits dropped from the right."""
    if narrower is None:
        return code
    first = narrower >> dropped << dropped
    return torch.minimum(torch.maximum(code, first), first + (2**dropped - 1))


def _squared_error(grouped: Tensor, own: Tensor, field: Tensor, candidate: Tensor, format: Format) -> Tensor:
    """Squared error of each group with exponent field `candidate`, in units of (s_8 of `field` / 256)^2, exact.

    `own` marks the group's own weights: the zeros that fill a short group do not count.
    """
    precision = format.exponent_by_error
    assert precision is not None
    scale = power_of_two(15 + EXPONENT_OFFSET - field.to(torch.int32))[..., None]
    target = torch.floor(grouped * scale).clamp(-ERROR_LIMIT, ERROR_LIMIT).to(torch.int64)
    code = _nested_code(grouped, candidate, format) >> (WIDEST.mantissa - precision.mantissa)
    value = (2 * code.to(torch.int64) + int(2 * nested_bias(precision))) << (WIDEST.mantissa - precision.mantissa + 7)
    value = value >> (field.to(torch.int64) - candidate.to(torch.int64))[..., None]
    return ((target - value) * own).square().sum(-1)
