"""SEFP, shared exponent floating point: the number format, in plain torch.

A matrix is cut into groups of 64 consecutive weights along its last dimension (the input dimension of a linear layer).
A group stores one byte, its scale, and each weight a short code. The byte is the upper half of an IEEE half float:

    scale = half(byte << 8)     1 bit of sign, 5 of exponent (2^-14 … 2^15), 2 of mantissa (1, 1.25, 1.5, 1.75)
    s_m   = |scale| · 2^(1-m)   the step at a width of m mantissa bits

Byte 0 is a group of zeros; zero with a sign, subnormal numbers, infinities and NaN are no scales. A code has 1 + m
bits, so a weight costs 1 + m + 8/64 bits. With E = floor(log2(max |w|)) over the group, clamped to [-14, 15], there are
three ways to choose scale and code:

``truncate``  scale 2^E; sign and q = floor(|w| / s_m), value ±q·s_m. Cutting the last bit of q gives the next width
              exactly, but every weight shrinks and the cell around zero is twice as wide as the others.
``nearest``   scale 2^E; sign and q = round(|w| / s_m), ties to even, at most 2^m - 1. The best each width can do alone
              with such a scale. A narrower width is a *rounded* slice of a wider one, so it needs one bit more than
              it keeps.
``nested``    the default: u = clamp(floor(±w / s_8) + 272, 16, 511), an offset-binary code of 9 bits, cut as
              u_m = u >> (8-m), value (u_m + bias_m) · scale · 2^(1-m) with bias_m = 0.5 - 8.5·2^(m-3). The 272 is 256
              for the offset plus 16, half a step of M3: at M3 the cut rounds to nearest with a true zero, and each
              further bit halves the cell. The decode is one multiply and one add, the same for a whole group.

The scale of a ``nested`` group is chosen in two steps. Its sign is negative, and the group is negated before it is
encoded, where that makes the largest weight negative: the code reaches 8 steps of M3 on that side, 7.5 on the other.
Its magnitude is the first of 2^E times 1.25, 1 and 2^(E-1) times 1.75, 1.5, 1.25, 1 that leaves the smallest squared
error over the group at :data:`ERROR_WIDTH`.

Every implementation must decide alike, always. So w / s_8 is a single product in float32, of w and the inverse of the
mantissa in float32 times a power of two (a division is not rounded the same everywhere, and a product must not be fused
with an addition), and errors are whole numbers: both weight and value in units of 2^(E-11), the weight as the middle of
the two units it lies in.

Training may give narrow widths weights of their own (see :mod:`otaro.tune.tiers`): `tiers` are then such weights, each
with the width down to which it decides the bits. A tier decides within the cell that the narrower ones chose, so that
all of them are still prefixes of one code; the scale comes from the weight itself, or is given.

Every fast path is tested against this file bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from otaro.errors import FormatError, WeightError
from otaro.precision import WIDEST, Precision

Scheme = Literal["truncate", "nearest", "nested"]
Tiers = Sequence[tuple[Precision, Tensor]]
"""Weights that decide the bits down to a width, the narrowest first."""
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
GROUP_SIZES = (32, 64, 128, 256)
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

EXPONENT_MIN, EXPONENT_MAX, EXPONENT_OFFSET = -14, 15, 15
SCALE_MIN, SCALE_MAX, SCALE_SIGN = 0x04, 0x7B, 0x80
"""The bytes of 2^-14 and 2^15 · 1.75, the smallest and the largest magnitude, and the bit of the sign."""
CANDIDATES = 6
"""A ``nested`` group's scale is the byte above that of 2^E or one of the next five below it."""
ERROR_WIDTH = Precision.E5M5
"""The width at which the error of a group decides its scale."""
ERROR_UNIT = 11
"""Errors are counted in units of 2^(E-11): whole multiples at every width, and the sum of a group fits into 32 bits."""
NESTED_OFFSET, NESTED_MIN, NESTED_MAX = 272, 16, 511


@dataclass(frozen=True)
class Format:
    """The settings of the format; what a packed folder records."""

    scheme: Scheme = "nested"
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise FormatError(f"unknown scheme {self.scheme!r}: choose one of {', '.join(SCHEMES)}")
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            raise FormatError(f"group size {self.group_size} is not one of {', '.join(map(str, GROUP_SIZES))}")

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
    """A tensor in codes: `code` has the tensor's shape, `scale` a byte per group of a row."""

    code: Tensor
    scale: Tensor
    precision: Precision
    format: Format


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float32, exact on every device, for exponents of normal numbers."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def step(scale: Tensor, precision: Precision) -> Tensor:
    """The distance between two neighbouring values at a width, negative in a negated group, 0 in a group of zeros."""
    return scale.view(torch.float8_e5m2).float() * 2.0 ** (1 - precision.mantissa)


def nested_bias(precision: Precision) -> float:
    """What is added to a ``nested`` code before it is multiplied by the step."""
    return 0.5 - 8.5 * 2 ** (precision.mantissa - 3)


def check_scales(scale: Tensor, format: Format, name: str) -> None:
    """Refuse bytes that are no scales of a format, naming the tensor."""
    magnitude = scale & ~SCALE_SIGN
    valid = (scale == 0) | (magnitude >= SCALE_MIN) & (magnitude <= SCALE_MAX)
    if format.scheme != "nested":
        valid &= (scale & (SCALE_SIGN | 3)) == 0
    if not bool(valid.all()):
        raise FormatError(f"{name} holds a byte that is no scale: fetch its file again")


def check_weight(weight: Tensor, name: str = "the tensor") -> None:
    """Refuse what cannot be encoded, naming the tensor and the first bad position."""
    if weight.dtype not in WEIGHT_DTYPES:
        raise WeightError(f"{name} is {weight.dtype}: only float32, float16 and bfloat16 weights can be encoded")
    if weight.dim() == 0 or weight.numel() == 0:
        raise WeightError(f"{name} of shape {list(weight.shape)} holds no row of weights to encode")
    check_finite(weight, name)


def check_finite(weight: Tensor, name: str = "the tensor") -> None:
    """Refuse NaN and infinity in a tensor of any shape, naming it and the first bad position."""
    finite = torch.isfinite(weight)
    if not bool(finite.all()):
        index = int((~finite).flatten().int().argmax())
        raise not_finite(weight, index, name)


def not_finite(weight: Tensor, index: int, name: str = "the tensor") -> WeightError:
    """The error for a NaN or infinity at a flat position."""
    position = [int(place) for place in torch.unravel_index(torch.tensor(index), weight.shape)]
    value = float(weight.flatten()[index])
    return WeightError(f"{name} holds {value} at {position}: weights must be finite")


def group_exponents(weight: Tensor, group_size: int) -> Tensor:
    """floor(log2(max |w|)) of every group before it is clamped, [..., groups]; -127 for subnormal float32 numbers."""
    largest = in_groups(weight.float().abs(), group_size).amax(-1)
    return (largest.view(torch.int32) >> 23) - 127


def group_scales(weight: Tensor, format: Format) -> Tensor:
    """The scale of every group, [..., groups]."""
    grouped = in_groups(weight.float(), format.group_size)
    exponent = group_exponents(weight, format.group_size).clamp(EXPONENT_MIN, EXPONENT_MAX)
    scale = (exponent + EXPONENT_OFFSET) << 2
    if format.scheme == "nested":
        negative = grouped.amax(-1) > -grouped.amin(-1)
        grouped = torch.where(negative[..., None], -grouped, grouped)
        filled = in_groups(torch.ones(weight.shape[-1], dtype=torch.bool, device=weight.device), format.group_size)
        first, scale = scale, scale + 1
        least = _squared_error(grouped, filled, first, scale)
        for lowered in range(CANDIDATES - 1):
            candidate = (first - lowered).clamp(min=SCALE_MIN)
            error = _squared_error(grouped, filled, first, candidate)
            scale = torch.where(error < least, candidate, scale)
            least = torch.minimum(error, least)
        scale = scale | negative * SCALE_SIGN
    return torch.where((grouped == 0).all(-1), torch.zeros_like(scale), scale).to(torch.uint8)


def encode(weight: Tensor, precision: Precision = WIDEST, format: Format = Format()) -> Codes:
    """The codes of a tensor at a width; ``truncate`` and ``nested`` give the same as cutting its E5M8 codes."""
    check_weight(weight)
    return encode_unchecked(weight, precision, format)


def encode_unchecked(
    weight: Tensor, precision: Precision, format: Format, tiers: Tiers = (), scale: Tensor | None = None
) -> Codes:
    """`encode` for weights known to be finite: no synchronisation with the device. `scale` need not be found again."""
    if scale is None:
        scale = group_scales(weight, format)
    if format.scheme == "nested":
        code = _tiered_code(weight, scale, precision, format, tiers) >> (WIDEST.mantissa - precision.mantissa)
    else:
        grouped = in_groups(weight.float(), format.group_size)
        scaled = grouped.abs() * _inverse_step(scale, precision)
        magnitude = torch.floor(scaled) if format.scheme == "truncate" else torch.round(scaled)
        magnitude = magnitude.clamp(max=2**precision.mantissa - 1).to(torch.int16)
        code = magnitude | (grouped < 0).to(torch.int16) << precision.mantissa
    return Codes(_out_of_groups(code, weight.shape[-1]), scale, precision, format)


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
    return Codes(code, codes.scale, precision, codes.format)


def decode(codes: Codes, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values the codes stand for: exact in float32, in other types rounded to nearest, ties to even."""
    code = in_groups(codes.code, codes.format.group_size)
    size = step(codes.scale, codes.precision)[..., None]
    if codes.format.scheme == "nested":
        value = (code.float() + nested_bias(codes.precision)) * size
    else:
        value = (code & (2**codes.precision.mantissa - 1)).float() * size
        value = torch.where(code >> codes.precision.mantissa != 0, -value, value)
    return _out_of_groups(value, codes.code.shape[-1]).to(dtype)


def in_groups(tensor: Tensor, group_size: int) -> Tensor:
    """[..., columns] as [..., groups, group_size], a short last group filled with zeros."""
    missing = -tensor.shape[-1] % group_size
    if missing:
        tensor = torch.nn.functional.pad(tensor, (0, missing))
    return tensor.unflatten(-1, (-1, group_size))


def _out_of_groups(tensor: Tensor, columns: int) -> Tensor:
    return tensor.flatten(-2)[..., :columns].contiguous()


def _inverse_step(scale: Tensor, precision: Precision) -> Tensor:
    """1 / s_m of every group, as float32 has it: the inverse of the mantissa, times a power of two."""
    scale = scale.to(torch.int32)
    inverse = 4 / (4 + (scale & 3)).float()
    return (inverse * power_of_two(precision.mantissa - 1 + EXPONENT_OFFSET - (scale >> 2 & 31)))[..., None]


def _nested_code(grouped: Tensor, scale: Tensor) -> Tensor:
    scaled = grouped * _inverse_step(scale, WIDEST)
    # A product that underflows to zero still lies below zero if the weight does.
    cell = torch.where((grouped < 0) & (scaled == 0), -torch.ones_like(scaled), torch.floor(scaled))
    return (cell + NESTED_OFFSET).clamp(NESTED_MIN, NESTED_MAX).to(torch.int16)


def _tiered_code(weight: Tensor, scale: Tensor, precision: Precision, format: Format, tiers: Tiers) -> Tensor:
    """E5M8 codes in groups, of which the bits down to `precision` are decided."""
    negative = (scale >= SCALE_SIGN)[..., None]
    code: Tensor | None = None
    dropped = 0
    for width, tier in [*tiers, (WIDEST, weight)]:
        grouped = in_groups(tier.float(), format.group_size)
        free = _nested_code(torch.where(negative, -grouped, grouped), scale)
        code = _within(free, code, dropped)
        if width >= precision:
            break
        dropped = WIDEST.mantissa - width.mantissa
    assert code is not None
    return code


def _within(code: Tensor, narrower: Tensor | None, dropped: int) -> Tensor:
    """The code nearest to `code` in the cell of `narrower`: alike but for the bits dropped from the right."""
    if narrower is None:
        return code
    first = narrower >> dropped << dropped
    return torch.minimum(torch.maximum(code, first), first + (2**dropped - 1))


def _squared_error(grouped: Tensor, filled: Tensor, first: Tensor, candidate: Tensor) -> Tensor:
    """Squared error of each group with the scale `candidate`, in units of 2^(E-11), E the exponent of `first`.

    `filled` marks the group's own weights: the zeros that fill a short group do not count.
    """
    mantissa = ERROR_WIDTH.mantissa
    scaled = grouped * power_of_two(ERROR_UNIT - 1 + EXPONENT_OFFSET - (first >> 2))[..., None]
    target = 2 * torch.floor(scaled).clamp(-(2**ERROR_UNIT), 2**ERROR_UNIT - 1).to(torch.int32) + 1
    code = _nested_code(grouped, candidate).to(torch.int32) >> (WIDEST.mantissa - mantissa)
    size = 4 + (candidate & 3) << (ERROR_UNIT - 2 - mantissa + (candidate >> 2) - (first >> 2))
    value = (2 * code + int(2 * nested_bias(ERROR_WIDTH))) * size[..., None]
    return ((target - value) * filled).square().sum(-1)
