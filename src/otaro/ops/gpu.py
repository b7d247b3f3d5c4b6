"""Quantising weights on a GPU: every weight of a model in one launch, written in Triton.

A step of tuning needs the values of all weights at the step's width. They are a few hundred megabytes, well under a
millisecond of memory traffic, but one small launch per layer and operation costs tens of milliseconds. So the kernel
walks over a list of tensors: each program takes a block of groups of one of them, found in a table made once per list.
The width is an argument, not a constant, so one compiled kernel serves all of them.

Same results as :mod:`otaro.sefp`, bit for bit: steps are built from the bits of scales, no product that rounds is fused
with a sum, and errors are whole numbers that a float holds exactly, squared and added up in integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from otaro.precision import Precision
from otaro.sefp import CANDIDATES, ERROR_WIDTH, SCHEMES, WEIGHT_DTYPES, Format, Tiers, nested_bias

BLOCK_WEIGHTS = 1024
WARPS = 4
"""So, of whole groups of up to 128 weights, a thread has four or eight of one group, and none is divided among warps:
each sum over a group would need a barrier then."""
MOST_TIERS = 2
ALIGNMENT = 16
_TRITON_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


# Adding 1.5·2^23 to a number below 2^22 rounds it to a whole one and leaves that in the lowest bits: conversions
# between float and integer run at an eighth of the speed of an addition.
_MAGIC = tl.constexpr(12582912.0)
_MAGIC_BITS = tl.constexpr(1262485504)


@triton.jit
def _floor(x):
    """The whole number at or below one that is smaller than 2^22, still in float."""
    rounded = (x + _MAGIC) - _MAGIC
    return rounded - (rounded > x).to(tl.float32)


@triton.jit
def _integer(magic):
    """A whole number to which the magic one was added."""
    return magic.to(tl.int32, bitcast=True) - _MAGIC_BITS


@triton.jit
def _float(integer):
    return (integer + _MAGIC_BITS).to(tl.float32, bitcast=True) - _MAGIC


@triton.jit
def _away_from_zero(weight):
    """A weight below zero lies in a cell below zero; so far from it its product cannot underflow."""
    return tl.where(weight < 0, tl.minimum(weight, -(2.0**-60)), weight)


@triton.jit
def _step(scale, mantissa):
    """The signed step of each group; of no use in a group of zeros."""
    size = _float(4 + (scale & 3)) * _power_of_two(((scale >> 2) & 31) - 16 - mantissa)
    return tl.where(scale >= 128, -size, size)


@triton.jit
def _inverse_step(scale, mantissa):
    quarters = scale & 3
    inverse = tl.where(quarters == 0, 1.0, tl.where(quarters == 1, 4 / 5, tl.where(quarters == 2, 4 / 6, 4 / 7)))
    return inverse * _power_of_two(mantissa + 14 - ((scale >> 2) & 31))


@triton.jit
def _cell(weight, inverse, low, high):
    """The cell a weight lies in, in steps, by floor. The clamp stands between the product and the sums of the floor."""
    return _floor(tl.minimum(tl.maximum(weight * inverse, low), high))


@triton.jit
def _nested_code(weight, scale):
    cell = _cell(_away_from_zero(weight), _inverse_step(scale, 8)[:, None], -256.0, 239.0)
    return _integer(cell + (_MAGIC + 272.0))


@triton.jit
def _within(code, narrower, dropped):
    first = (narrower >> dropped) << dropped
    return tl.minimum(tl.maximum(code, first), first + (1 << dropped) - 1)


@triton.jit
def _squared_error(weight, target, missing, first, scale, mantissa: tl.constexpr):
    """Of each group with a scale, `target` being the weights in units of 2^(E-11), the magic number added; at widths of
    at least four bits a value is the middle of its cell. Every number here is whole, and a float holds it exactly.

    The zeros that fill a group, as many as are `missing`, do not count."""
    low: tl.constexpr = -(1 << mantissa)
    high: tl.constexpr = (1 << (mantissa + 1)) - 1 - (17 << (mantissa - 4))
    cell = _cell(weight, _inverse_step(scale, mantissa)[:, None], low * 1.0, high * 1.0)
    half = (4 + (scale & 3)) << (9 - mantissa + (scale >> 2) - (first >> 2))
    size = _float(half)[:, None]
    error = _integer((target - size) - cell * (2.0 * size))
    return tl.sum(error * error, axis=1) - missing * (half - 1) * (half - 1)


@triton.jit
def _find_scale(weight, missing, scheme: tl.constexpr, candidates: tl.constexpr, error_mantissa: tl.constexpr):
    """The scale of each group, 0 where all weights are zero; `missing` weights of it are zeros that fill it up."""
    above, below = tl.max(weight, axis=1), -tl.min(weight, axis=1)
    largest = tl.maximum(above, below)
    field = (largest.to(tl.int32, bitcast=True) >> 23) - 112
    first = tl.minimum(tl.maximum(field, 1), 30) << 2
    scale = first
    if scheme == 2:
        scale = first + 1
        negative = above > below
        weight = tl.where(negative[:, None], -weight, weight)
        target = weight * _power_of_two(25 - (first >> 2))[:, None]
        target = 2.0 * _floor(tl.minimum(tl.maximum(target, -2048.0), 2047.0)) + (_MAGIC + 1.0)
        weight = _away_from_zero(weight)
        least = _squared_error(weight, target, missing, first, scale, error_mantissa)
        for lowered in tl.static_range(candidates - 1):
            candidate = tl.maximum(first - lowered, 4)
            error = _squared_error(weight, target, missing, first, candidate, error_mantissa)
            scale = tl.where(error < least, candidate, scale)
            least = tl.minimum(error, least)
        scale |= negative.to(tl.int32) << 7
    return tl.where(largest == 0.0, 0, scale)


@triton.jit
def _places(
    block_tensor,
    block_start,
    all_columns,
    all_groups,
    flat: tl.constexpr,
    group_size: tl.constexpr,
    count: tl.constexpr,
):
    """A program's tensor, the numbers of its groups, which there are, and where their weights lie."""
    program = tl.program_id(0)
    tensor = tl.load(block_tensor + program)
    columns = tl.load(all_columns + tensor)
    start = tl.load(block_start + program)
    group = start + tl.arange(0, count)
    there = group < tl.load(all_groups + tensor)
    if flat:
        within = tl.arange(0, count)[:, None] * group_size + tl.arange(0, group_size)[None, :]
        offset = start.to(tl.int64) * group_size + within
        own = tl.broadcast_to(there[:, None], (count, group_size))
    else:
        per_row = (columns + group_size - 1) // group_size
        column = (group % per_row)[:, None] * group_size + tl.arange(0, group_size)[None, :]
        offset = (group // per_row).to(tl.int64)[:, None] * columns + column
        own = there[:, None] & (column < columns)
    return tensor, group, there, offset, own


@triton.jit
def _pointer(table, tensor, flat: tl.constexpr, kind: tl.constexpr):
    pointer = tl.load(table + tensor).to(tl.pointer_type(kind))
    if flat:
        pointer = tl.multiple_of(pointer, 16)  # said of the address alone it would be forgotten, and loads be single
    return pointer


@triton.jit
def _loaded(table, tensor, offset, own, flat: tl.constexpr, source_type: tl.constexpr):
    return tl.load(_pointer(table, tensor, flat, source_type) + offset, mask=own, other=0.0).to(tl.float32)


@triton.jit
def _code(table, tensor, offset, own, scale, flat: tl.constexpr, source_type: tl.constexpr):
    """E5M8 codes of one of the tensors that decide, negated where the scale is negative."""
    weight = _loaded(table, tensor, offset, own, flat, source_type)
    return _nested_code(tl.where((scale >= 128)[:, None], -weight, weight), scale)


@triton.jit
def _quantize_kernel(
    sources,
    results,
    narrow_tiers,
    wide_tiers,
    all_columns,
    all_groups,
    first_groups,
    scales,
    block_tensor,
    block_start,
    mantissa,
    bias,
    narrow: tl.constexpr,
    wide: tl.constexpr,
    scheme: tl.constexpr,
    sliced: tl.constexpr,
    candidates: tl.constexpr,
    error_mantissa: tl.constexpr,
    known: tl.constexpr,
    flat: tl.constexpr,
    group_size: tl.constexpr,
    groups_per_block: tl.constexpr,
    source_type: tl.constexpr,
    result_type: tl.constexpr,
):
    tensor, group, there, offset, own = _places(
        block_tensor, block_start, all_columns, all_groups, flat, group_size, groups_per_block
    )
    here = scales + tl.load(first_groups + tensor) + group
    if known:
        scale = tl.load(here, mask=there, other=0).to(tl.int32)
    else:
        weight = _loaded(sources, tensor, offset, own, flat, source_type)
        missing = 0 if flat else tl.sum((~own).to(tl.int32), axis=1)
        scale = _find_scale(weight, missing, scheme, candidates, error_mantissa)
        tl.store(here, scale.to(tl.uint8), mask=there)
    if scheme == 2:
        if narrow > 0:
            code = _code(narrow_tiers, tensor, offset, own, scale, flat, source_type)
            if wide > 0:  # noqa: SIM102 (known when the kernel is compiled, the other when it runs)
                if mantissa > narrow:
                    code = _within(_code(wide_tiers, tensor, offset, own, scale, flat, source_type), code, 8 - narrow)
            last: tl.constexpr = wide if wide > 0 else narrow
            if mantissa > last:
                code = _within(_code(sources, tensor, offset, own, scale, flat, source_type), code, 8 - last)
        else:
            code = _code(sources, tensor, offset, own, scale, flat, source_type)
        code = code >> (8 - mantissa)
        value = (_float(code) + bias) * _step(scale, mantissa)[:, None]
    else:
        limit = ((1 << mantissa) - 1).to(tl.float32)
        bits = 8 if sliced else mantissa
        weight = _loaded(sources, tensor, offset, own, flat, source_type)
        magnitude = tl.abs(weight) * _inverse_step(scale, bits)[:, None]
        magnitude = tl.minimum(magnitude, 1048576.0)
        # Adding and taking away 1.5·2^23 rounds to a whole number, ties to even.
        magnitude = tl.floor(magnitude) if scheme == 0 else (magnitude + 12582912.0) - 12582912.0
        if sliced:
            master = tl.minimum(magnitude, 255.0).to(tl.int32)
            magnitude = ((master + ((1 << (8 - mantissa)) >> 1)) >> (8 - mantissa)).to(tl.float32)
        value = tl.minimum(magnitude, limit) * _step(scale, mantissa)[:, None]
        value = tl.where(weight < 0, -value, value)
    value = tl.where((scale == 0)[:, None], 0.0, value)
    tl.store(_pointer(results, tensor, flat, result_type) + offset, value.to(result_type), mask=own)


@dataclass(frozen=True)
class Batch:
    """Tensors that are quantised together, with the tables the kernel walks by. Holds on to them."""

    sources: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    tiers: tuple[tuple[Precision, tuple[Tensor, ...]], ...]
    tables: tuple[Tensor, ...]
    blocks: int
    group_size: int
    flat: bool
    """Tensors are one whole group after the other, and begin at multiples of :data:`ALIGNMENT` bytes."""

    @property
    def scales(self) -> Tensor:
        """The scales of the last run, those of all sources after one another."""
        return self.tables[7]


def aligned(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def prepare(
    sources: Sequence[Tensor],
    results: Sequence[Tensor],
    group_size: int,
    tiers: Sequence[tuple[Precision, Sequence[Tensor]]] = (),
) -> Batch:
    """Tables for quantising `sources` into `results`: contiguous, on one device, each list of one dtype.

    `tiers`, at most two, hold a tensor for every source.
    """
    if len(tiers) > MOST_TIERS:
        raise ValueError(f"the kernel knows {MOST_TIERS} tiers, not {len(tiers)}")
    for _, tensors in tiers:
        if any(tier.shape != source.shape for tier, source in zip(tensors, sources, strict=True)):
            raise ValueError("each tier must have the shape of its source")
    for tensors in ([*sources, *(tensor for _, tier in tiers for tensor in tier)], results):
        if len({tensor.dtype for tensor in tensors}) != 1 or tensors[0].dtype not in WEIGHT_DTYPES:
            raise ValueError("the tensors of a batch must share a dtype: float32, float16 or bfloat16")
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("the tensors of a batch must be contiguous")
    if any(source.shape != result.shape for source, result in zip(sources, results, strict=True)):
        raise ValueError("each result must have the shape of its source")
    per_block = BLOCK_WEIGHTS // group_size
    columns = [source.shape[-1] for source in sources]
    groups = [source.numel() // width * -(-width // group_size) for source, width in zip(sources, columns, strict=True)]
    blocks = torch.tensor([-(-count // per_block) for count in groups])
    tensor_of = torch.arange(len(blocks)).repeat_interleave(blocks)
    start_of = (torch.arange(len(tensor_of)) - (blocks.cumsum(0) - blocks)[tensor_of]) * per_block
    device = sources[0].device

    def table(values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    tables = (
        table([source.data_ptr() for source in sources], torch.int64),
        table([result.data_ptr() for result in results], torch.int64),
        *(table([tensor.data_ptr() for tensor in tier], torch.int64) for _, tier in tiers),
        *(table([0], torch.int64) for _ in range(MOST_TIERS - len(tiers))),
        table(columns, torch.int32),
        table(groups, torch.int32),
        table([0, *itertools.accumulate(groups)], torch.int64),
        torch.zeros(sum(groups), dtype=torch.uint8, device=device),
        tensor_of.to(device, torch.int32),
        start_of.to(device, torch.int32),
    )
    kept = tuple((width, tuple(tier)) for width, tier in tiers)
    everything = [*sources, *results, *(tensor for _, tier in tiers for tensor in tier)]
    flat = all(width % group_size == 0 for width in columns) and aligned(everything)
    return Batch(tuple(sources), tuple(results), kept, tables, len(tensor_of), group_size, flat)


def run(batch: Batch, precision: Precision, format: Format, *, sliced: bool = False, again: bool = False) -> None:
    """Write the values of the batch's sources at a width into its results, in one launch.

    `sliced` takes ``nearest`` from its E5M8 codes, as a packed model does, instead of from the sources. `again` takes
    the batch's scales as they are: the sources are what they were when these were found.
    """
    mantissa = precision.mantissa
    widths = [width.mantissa for width, _ in batch.tiers] + [0] * (MOST_TIERS - len(batch.tiers))
    _quantize_kernel[(batch.blocks,)](
        *batch.tables,
        mantissa,
        nested_bias(precision),
        narrow=widths[0],
        wide=widths[1],
        scheme=SCHEMES.index(format.scheme),
        sliced=sliced and format.scheme == "nearest",
        candidates=CANDIDATES,
        error_mantissa=ERROR_WIDTH.mantissa,
        known=again,
        flat=batch.flat,
        group_size=batch.group_size,
        groups_per_block=BLOCK_WEIGHTS // batch.group_size,
        source_type=_TRITON_TYPES[batch.sources[0].dtype],
        result_type=_TRITON_TYPES[batch.results[0].dtype],
        num_warps=WARPS,
    )


def quantize(
    weight: Tensor, precision: Precision, format: Format, tiers: Tiers = (), scale: Tensor | None = None
) -> Tensor:
    """The values a weight takes at a width, in its own dtype."""
    source = weight.contiguous()
    result = torch.empty_like(source)
    listed = [(width, [tier.contiguous()]) for width, tier in tiers]
    batch = prepare([source], [result], format.group_size, listed)
    if scale is not None:
        batch.scales.copy_(scale.flatten())
    run(batch, precision, format, again=scale is not None)
    return result
