"""SEFP codes as GGUF blocks of 32 weights that decode to the same values (scheme "nested").

With d the step of the group, negative where the group is negated:

    E5M3  Q4_0   (q - 8) * d              q = u
    E5M4  Q5_1   q * d + m                q = u, m = -16.5 * d
    E5M5  Q8_0   q * d / 2                q = 2u - 67, an odd number
    E5M6  Q8_0   q * d / 2                q = 2u - 135, within -127 ... 119
    E5M7, E5M8, and rows that are no multiple of 32: F16

A step has three significant bits and d, d / 2 and 16.5 * d are float16 numbers, so the blocks give the same values bit
for bit. Of values at E5M7 all significant bits, 11 at most, fit a float16; at E5M8 there are 12, and they are rounded
to the nearest. What is too large for a float16 is refused.

What llama.cpp computes with blocks is another matter: beside all of these types it rounds activations to 8 bits. Half
of what that costs comes from the projections to values, so these are F16 where heads share them and they are small.
Where all products must be as exact as the weights, every width becomes F16, and E5M8 F32.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from otaro import sefp
from otaro.errors import FormatError
from otaro.precision import WIDEST, Precision
from otaro.sefp import Codes

BLOCK = 32


def block_type(precision: Precision, columns: int, *, exact: bool = False) -> GGMLQuantizationType:
    """The GGUF type that holds a width's values; `exact` asks for every bit, of products too."""
    plain = GGMLQuantizationType.F32 if exact and precision == WIDEST else GGMLQuantizationType.F16
    if exact or columns % BLOCK:
        return plain
    types = {
        Precision.E5M3: GGMLQuantizationType.Q4_0,
        Precision.E5M4: GGMLQuantizationType.Q5_1,
        Precision.E5M5: GGMLQuantizationType.Q8_0,
        Precision.E5M6: GGMLQuantizationType.Q8_0,
    }
    return types.get(precision, plain)


def encode_blocks(codes: Codes, *, exact: bool = False) -> NDArray[Any]:
    """A matrix's codes in the type `block_type` names: rows of bytes, or float16 or float32 values."""
    kind = block_type(codes.precision, codes.code.shape[-1], exact=exact)
    if kind == GGMLQuantizationType.F32:
        singles: NDArray[numpy.float32] = sefp.decode(codes).numpy()
        return singles
    if kind == GGMLQuantizationType.F16:
        values = sefp.decode(codes).to(torch.float16)
        if not bool(torch.isfinite(values).all()):
            raise FormatError("a weight of 65520 or more does not fit float16: this tensor cannot be exported")
        halves: NDArray[numpy.float16] = values.numpy()
        return halves
    code = codes.code.numpy()
    rows = code.shape[0]
    step = _signed_steps(codes)[..., None]
    q = code.reshape(rows, -1, BLOCK)
    if kind == GGMLQuantizationType.Q8_0:
        half_steps = (2 * q + int(2 * sefp.nested_bias(codes.precision))).astype(numpy.int8)
        parts: list[NDArray[Any]] = [_bytes(step / 2), half_steps.view(numpy.uint8)]
    else:
        q = q.astype(numpy.uint8)
        nibbles = (q[..., : BLOCK // 2] & 15) | (q[..., BLOCK // 2 :] & 15) << 4
        if kind == GGMLQuantizationType.Q4_0:
            parts = [_bytes(step), nibbles]
        else:
            fifth = numpy.packbits(q >> 4, axis=-1, bitorder="little")
            parts = [_bytes(step), _bytes(step * -16.5), fifth, nibbles]
    result: NDArray[numpy.uint8] = numpy.concatenate(parts, axis=-1).reshape(rows, -1)
    return result


def _signed_steps(codes: Codes) -> NDArray[numpy.float32]:
    """The step of each block of 32, [rows, blocks]."""
    step = sefp.step(codes.scale, codes.precision).numpy()
    blocks = numpy.repeat(step, codes.format.group_size // BLOCK, axis=-1)
    result: NDArray[numpy.float32] = blocks[:, : codes.code.shape[-1] // BLOCK]
    return result


def _bytes(values: NDArray[Any]) -> NDArray[numpy.uint8]:
    """[..., 1] floats as [..., 2] bytes of float16."""
    with numpy.errstate(over="ignore"):
        half = values.astype(numpy.float16)
    if not numpy.isfinite(half).all():
        raise FormatError("a weight of 32768 or more has no place in this type of GGUF: export a wider precision")
    return half.view(numpy.uint8)
