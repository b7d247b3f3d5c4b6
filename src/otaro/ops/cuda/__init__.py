"""SEFP weights on NVIDIA GPUs: CUDA kernels on planes in fragment order.

    layout    planes of the files ↔ fragment order, in plain torch
    calls     the kernels' arguments, and how a product is divided among blocks
    compiler  NVRTC, the cache of compiled kernels, launches
    matvec.cu, decode.cu      the kernels; planes.cuh: where bits lie; machine.cuh: the instructions they use

`linear` picks by batch: up to 16 rows of x are multiplied straight from the planes, reading the bits of the width and
no others; more are multiplied by torch with the decoded weight. Scheme ``nested``, groups of 64, 128 or 256;
activations in float16 or bfloat16, sums in float32 in a fixed order. docs/gpu.md has the reasons.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from otaro.errors import PrecisionError
from otaro.ops.cuda import calls, compiler
from otaro.ops.cuda.calls import MOST_BATCH, Device, Plan
from otaro.ops.cuda.layout import ROWS, Fragments, from_planes, supports, to_planes
from otaro.precision import NARROWEST, Precision

__all__ = [
    "Fragments",
    "available",
    "dequantize",
    "embedding",
    "from_planes",
    "linear",
    "multiply",
    "supports",
    "to_planes",
]

_DECODE_THREADS, _MOST_BLOCKS = 128, 2**31 - 1


def available(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device, None where they can."""
    reason = compiler.available(device)
    if reason is None:
        # Compiled graphs take the answer as it is. Not a decorator: it imports torch's compiler, 100 MB for nothing
        # where there is no GPU.
        torch.compiler.assume_constant_result(_divides)
    return reason


def linear(
    x: Tensor, fragments: Fragments, precision: Precision, bias: Tensor | None, width: Tensor | None = None
) -> Tensor:
    """``x @ weight.T + bias`` at a width; differentiable in x and bias.

    `width`, a tensor of one int32 on the device, holds the mantissa bits to be used when the kernel runs, at most those
    of `precision`: a captured graph then serves every width.
    """
    differentiated = x.requires_grad or (bias is not None and bias.requires_grad)
    if not _multiplies(x, fragments, precision) or (differentiated and torch.is_grad_enabled()):
        if width is not None:
            raise ValueError(f"a width on the device needs at most {MOST_BATCH} rows in float16 or bfloat16")
        return torch.nn.functional.linear(x, dequantize(fragments, precision, x.dtype), bias)
    arguments = (x, *_arguments(fragments, precision), bias, width)
    result: Tensor = (
        torch.ops.otaro.fragments_linear(*arguments) if torch.compiler.is_compiling() else _linear(*arguments)
    )
    return result


def multiply(
    x: Tensor, fragments: Fragments, precision: Precision, bias: Tensor | None, overlap: bool, gated: int = 0
) -> Tensor | None:
    """`linear` for an engine: contiguous rows of x, all of `fragments`' planes, a bias of x's type, nothing checked.

    With `overlap` the launch may begin before its predecessor has ended: it fetches weights, then waits for x. The
    weights must have been there for longer than that. With `gated`, of every 16 rows of the weight the first 8 are
    gates and the others what they let through: the result is silu(gate) · up, of so many columns. None where no one
    launch can do it.
    """
    if not _multiplies(x, fragments, precision):
        return None
    y = x.new_empty((x.shape[0], gated or fragments.rows))
    if x.data_ptr() % 8:
        x = x.clone()
    _launch(x, fragments, bias, y, overlap=overlap, gated=gated)
    return y


def dequantize(fragments: Fragments, precision: Precision, dtype: torch.dtype) -> Tensor:
    """All values at a width."""
    arguments = (*_arguments(fragments, precision), None, dtype)
    compiling = torch.compiler.is_compiling()
    values: Tensor = torch.ops.otaro.fragments_rows(*arguments) if compiling else _rows(*arguments)
    return values.view(fragments.shape)


def embedding(ids: Tensor, fragments: Fragments, precision: Precision, dtype: torch.dtype) -> Tensor:
    """Rows of all leading dimensions taken as one matrix, [*ids.shape, columns]; NaN where there is no such row."""
    arguments = (*_arguments(fragments, precision), ids.flatten(), dtype)
    compiling = torch.compiler.is_compiling()
    values: Tensor = torch.ops.otaro.fragments_rows(*arguments) if compiling else _rows(*arguments)
    return values.view(*ids.shape, fragments.columns)


def _multiplies(x: Tensor, fragments: Fragments, precision: Precision) -> bool:
    """Whether a product is one kernel."""
    batch = x.numel() // fragments.columns
    if not 0 < batch <= MOST_BATCH or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    extra = precision.mantissa - NARROWEST.mantissa
    tiles, units = fragments.base.shape[:2]
    return _divides(_index(fragments.base), tiles, units, extra, calls.kernel_columns(batch))


def _divides(index: int, tiles: int, units: int, extra: int, columns: int) -> bool:
    return _has_plan(index, tiles, units, extra, columns)


@functools.cache
def _has_plan(index: int, tiles: int, units: int, extra: int, columns: int) -> bool:
    return calls.plan(ROWS * tiles, units, extra, columns, device_limits(index)) is not None


def _arguments(fragments: Fragments, precision: Precision) -> tuple[Tensor, list[Tensor], Tensor, int, int, int]:
    extra = precision.mantissa - NARROWEST.mantissa
    if extra > len(fragments.bits):
        raise PrecisionError(f"precision {precision} needs bits that are not here: only {fragments.stored} is")
    used = list(fragments.bits[:extra])
    return fragments.base, used, fragments.scale, fragments.rows, fragments.columns, fragments.group_size


def _linear(
    x: Tensor,
    base: Tensor,
    bits: list[Tensor],
    scale: Tensor,
    rows: int,
    columns: int,
    group_size: int,
    bias: Tensor | None,
    width: Tensor | None,
) -> Tensor:
    fragments = Fragments(base, tuple(bits), scale, (rows, columns), group_size)
    if x.shape[-1] != columns:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {columns}")
    _check_device(fragments, x, bias, width)
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], rows))
    if x.data_ptr() % 8:
        x = x.clone()
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    if width is not None and (width.dtype != torch.int32 or width.numel() != 1):
        raise ValueError("a width on the device is one int32")
    _launch(x, fragments, bias, y, width)
    return y


def _launch(
    x: Tensor,
    fragments: Fragments,
    bias: Tensor | None,
    y: Tensor,
    width: Tensor | None = None,
    overlap: bool = False,
    gated: int = 0,
) -> None:
    extra, rows, batch = len(fragments.bits), fragments.rows, math.prod(x.shape[:-1])
    units = fragments.base.shape[1]
    kernel, plan = launch_plan(_index(x), rows, units, extra, batch, width is not None, gated > 0)
    call = calls.matvec_call(x, fragments, extra, bias, y, plan, width, gated)
    kernel.launch(call, plan.split * plan.clusters, plan.threads, plan.shared_bytes(rows), plan.split, overlap)


def _rows(
    base: Tensor,
    bits: list[Tensor],
    scale: Tensor,
    rows: int,
    columns: int,
    group_size: int,
    ids: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    fragments = Fragments(base, tuple(bits), scale, (rows, columns), group_size)
    _check_device(fragments, ids)
    ids = None if ids is None else ids.long().contiguous()
    count = rows if ids is None else ids.numel()
    values = base.new_empty((count, columns), dtype=dtype)
    if count:
        call = calls.decode_call(fragments, len(bits), ids, values)
        blocks = count if ids is not None else -(-base.shape[0] * base.shape[1] // (_DECODE_THREADS // 32))
        compiler.kernel("decode", _index(base)).launch(call, min(blocks, _MOST_BLOCKS), _DECODE_THREADS)
    return values


def launch_plan(
    index: int,
    rows: int,
    units: int,
    extra: int,
    batch: int,
    dynamic: bool = False,
    gated: bool = False,
    **choices: int,
) -> tuple[compiler.Kernel, Plan]:
    """The kernel for a product and how it is divided, found once for each shape."""
    columns = calls.kernel_columns(batch)
    return _launch_plan(index, rows, units, extra, columns, dynamic, gated, tuple(sorted(choices.items())))


@functools.cache
def _launch_plan(
    index: int,
    rows: int,
    units: int,
    extra: int,
    columns: int,
    dynamic: bool,
    gated: bool,
    choices: tuple[tuple[str, int], ...],
) -> tuple[compiler.Kernel, Plan]:
    kernel = compiler.kernel(
        "matvec",
        index,
        OTARO_EXTRA=-1 if dynamic else extra,
        OTARO_COLUMNS=columns,
        OTARO_GATED=int(gated),
        OTARO_THREADS=32 * calls.most_warps(columns),
    )
    device, given = device_limits(index), dict(choices)
    plan = calls.plan(rows, units, extra, columns, device, **given)
    if plan is not None and plan.split > 1:
        # Clusters that do not all fit at once would come in a second wave, after the first.
        active = kernel.active_clusters(plan.split, plan.threads, plan.shared_bytes(rows))
        if 0 < active < plan.clusters:
            plan = calls.plan(rows, units, extra, columns, device, **given, most_clusters=active)
    if plan is None:
        raise ValueError(f"a weight of {rows} rows and {units} units of columns cannot be divided among blocks")
    return kernel, plan


@functools.cache
def device_limits(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)


def _index(tensor: Tensor) -> int:
    return tensor.device.index or 0


def _check_device(fragments: Fragments, *others: Tensor | None) -> None:
    for tensor in (*fragments.bits, fragments.scale, *others):
        if tensor is not None and tensor.device != fragments.base.device:
            raise ValueError(f"tensors on {tensor.device} and {fragments.base.device} cannot meet in one product")


_linear_op = torch.library.custom_op("otaro::fragments_linear", _linear, mutates_args=())
_rows_op = torch.library.custom_op("otaro::fragments_rows", _rows, mutates_args=())


@_linear_op.register_fake
def _(
    x: Tensor,
    base: Tensor,
    bits: list[Tensor],
    scale: Tensor,
    rows: int,
    columns: int,
    group_size: int,
    bias: Tensor | None,
    width: Tensor | None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


@_rows_op.register_fake
def _(
    base: Tensor,
    bits: list[Tensor],
    scale: Tensor,
    rows: int,
    columns: int,
    group_size: int,
    ids: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return base.new_empty((rows if ids is None else ids.shape[0], columns), dtype=dtype)
