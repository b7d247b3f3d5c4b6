"""Every op in plain torch, on any device: what the fast backends are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from otaro import packing, sefp
from otaro.packing import Planes
from otaro.precision import WIDEST, Precision
from otaro.sefp import Format, Tiers


def scales(weight: Tensor, format: Format) -> Tensor:
    """The scale of every group of a weight, [..., groups]."""
    return sefp.group_scales(weight, format)


def pack(weight: Tensor, format: Format, scale: Tensor | None = None) -> tuple[Planes, Tensor]:
    """The planes of a weight up to E5M8, and how many groups had their exponent clamped from [below, above]."""
    sefp.check_weight(weight)
    codes = sefp.encode_unchecked(weight, WIDEST, format, scale=scale)
    exponent = sefp.group_exponents(weight, format.group_size)
    clamped = ((exponent < sefp.EXPONENT_MIN) & (codes.scale > 0), exponent > sefp.EXPONENT_MAX)
    return packing.pack(codes), torch.stack([groups.sum() for groups in clamped])


def dequantize(planes: Planes, columns: int, precision: Precision, format: Format, dtype: torch.dtype) -> Tensor:
    """The values of packed weights at a width."""
    return sefp.decode(packing.unpack(planes, columns, precision, format), dtype)


def quantize(
    weight: Tensor, precision: Precision, format: Format, tiers: Tiers = (), scale: Tensor | None = None
) -> Tensor:
    """The values a weight takes at a width, in its own dtype."""
    return sefp.decode(sefp.encode_unchecked(weight, precision, format, tiers, scale), weight.dtype)


def linear(
    x: Tensor, planes: Planes, columns: int, precision: Precision, format: Format, bias: Tensor | None
) -> Tensor:
    """``x @ weight.T + bias`` with the weight at a width."""
    return torch.nn.functional.linear(x, dequantize(planes, columns, precision, format, x.dtype), bias)


def embedding(
    ids: Tensor, planes: Planes, columns: int, precision: Precision, format: Format, dtype: torch.dtype
) -> Tensor:
    """Rows of a packed matrix, shaped [*ids.shape, columns]."""
    if ids.device.type == "cpu" and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= planes.base.shape[0]):
        raise IndexError(f"a token id is outside 0 … {planes.base.shape[0] - 1}")
    codes = packing.unpack_rows(planes, ids.flatten(), columns, precision, format)
    return sefp.decode(codes, dtype).view(*ids.shape, columns)
