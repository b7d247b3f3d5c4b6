"""What lies between two products of a layer: Triton kernels where there is a GPU, the same in plain torch elsewhere.

Plain torch is what tests on a CPU run; the kernels themselves are compared with it in Triton's interpreter
(`tests/test_engine_cuda_kernels.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from otaro.engine.cuda import picking, plain
from otaro.engine.cuda.launches import overlaps, uses_triton
from otaro.engine.cuda.matrices import TURN
from otaro.engine.cuda.model import DeviceModel, Layer
from otaro.engine.cuda.rows import CacheLayout, Rows
from otaro.sefp import CANDIDATES, ERROR_WIDTH

KEYS = 128
"""Keys of a stretch: one program's, loaded at once."""
FEW_KEYS = 32
"""Keys at a time of very large heads, which take many registers."""
_SWIGLU_BLOCK, _LARGEST_BLOCK = 1024, 2048
MIXED_STRETCHES = 16
"""Stretches from which on rotation and attention of one row are one launch: with few of them two are quicker."""


def _options(device: torch.device, warps: int) -> dict[str, Any]:
    overlap = overlaps(device)
    return {"OVERLAP": overlap, "num_warps": warps, **({"launch_pdl": True} if overlap else {})}


def norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Add to the residual stream in place, and give its RMS norm."""
    if not uses_triton(x.device):
        return plain.norm(x, delta, weight, epsilon, dtype)
    from otaro.engine.cuda.kernels import norm_kernel

    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=dtype, device=x.device)
    block = _power_of_two(hidden)
    norm_kernel[(rows,)](
        *(x, x if delta is None else delta, weight, out, epsilon),
        HIDDEN=hidden,
        BLOCK=block,
        ADD=delta is not None,
        **_options(x.device, min(max(block // 512, 1), 16)),
    )
    return out


def swiglu(x: Tensor, columns: int, up: int) -> Tensor:
    """silu(gate) · up, of rows that hold the gate first and the other from column `up` on, or both in turns."""
    if not uses_triton(x.device):
        return plain.swiglu(x, columns, up)
    from otaro.engine.cuda.kernels import swiglu_kernel

    out = torch.empty((x.shape[0], columns), dtype=x.dtype, device=x.device)
    swiglu_kernel[(x.shape[0], -(-columns // _SWIGLU_BLOCK))](
        *(x, out),
        COLUMNS=columns,
        STRIDE=x.shape[1],
        UP=up,
        TURN=TURN if up == TURN else 0,
        BLOCK=_SWIGLU_BLOCK,
        **_options(x.device, 4),
    )
    return out


def rotate(model: DeviceModel, layer: Layer, number: int, qkv: Tensor, rows: Rows) -> Tensor:
    """Queries at their positions; keys and values go into the cache."""
    if not uses_triton(qkv.device):
        return plain.rotate(model, layer, number, qkv, rows)
    from otaro.engine.cuda.kernels import rotate_kernel

    shape, layout = model.shape, rows.layout
    count, dimension = qkv.shape[0], shape.head_dimension
    block = _block(layout)
    warps = 1 if layout.precision is None else max(1, block // 64)  # one for each group that is to have a scale
    query = torch.empty((count, shape.heads * dimension), dtype=qkv.dtype, device=qkv.device)
    unused = model.frequency
    rotate_kernel[(count, shape.heads + 2 * shape.kv_heads)](
        *(qkv, rows.positions, rows.places, model.frequency),
        *(unused if norm is None else norm for norm in (layer.query_norm, layer.key_norm)),
        *(query, count, number, shape.norm_epsilon, shape.rope_factor),
        STRIDE=qkv.shape[1],
        KEY=layer.qkv.starts[1],
        VALUE=layer.qkv.starts[2],
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        DIM=dimension,
        BLOCK=block,
        NORMED=layer.query_norm is not None,
        MANTISSA=layout.mantissa,
        PADDED=layout.padded,
        ROW=layout.row,
        SCALES=layout.scales,
        CANDIDATES=CANDIDATES,
        ERROR_MANTISSA=ERROR_WIDTH.mantissa,
        **_options(qkv.device, warps),
    )
    return query


def attend(model: DeviceModel, layer: Layer, number: int, query: Tensor, rows: Rows) -> Tensor:
    """Each row's queries against its text up to its position."""
    if not uses_triton(query.device):
        return plain.attend(model, layer, number, query, rows)
    from otaro.engine.cuda.kernels import attend_kernel

    shape, layout, stretches = model.shape, rows.layout, rows.stretches
    count, dimension, block = query.shape[0], shape.head_dimension, _block(layout)
    out, partial, extremes = _mixed(model, query, stretches)
    group = shape.heads // shape.kv_heads
    attend_kernel[(count, shape.kv_heads, stretches)](
        *(query, rows.positions, rows.places, out, partial, extremes, count, number, dimension**-0.5),
        KV_HEADS=shape.kv_heads,
        GROUP=group,
        GROUP_BLOCK=max(16, _power_of_two(group)),
        DIM=dimension,
        BLOCK=block,
        KEYS=KEYS,
        TILE=KEYS if block <= 128 else FEW_KEYS,
        WINDOW=layer.window,
        STRETCHES=stretches,
        MANTISSA=layout.mantissa,
        PADDED=layout.padded,
        ROW=layout.row,
        SCALES=layout.scales,
        **_options(query.device, 4 if layout.precision is None else 8),
    )
    _combine(model, layer, out, partial, extremes, rows)
    return out


def mix(model: DeviceModel, layer: Layer, number: int, qkv: Tensor, rows: Rows) -> Tensor:
    """`rotate` and `attend`, of one row in one launch where that can be."""
    shape, block = model.shape, _block(rows.layout)
    single = qkv.shape[0] == 1 and rows.layout.precision is None and layer.query_norm is None and block <= 128
    if not uses_triton(qkv.device) or not single or rows.stretches < MIXED_STRETCHES:
        return attend(model, layer, number, rotate(model, layer, number, qkv, rows), rows)
    from otaro.engine.cuda.kernels import mix_kernel

    group = shape.heads // shape.kv_heads
    out, partial, extremes = _mixed(model, qkv, rows.stretches)
    mix_kernel[(shape.kv_heads, rows.stretches)](
        *(qkv, rows.positions, rows.places, model.frequency, out, partial, extremes),
        *(number, shape.head_dimension**-0.5, shape.rope_factor),
        KEY=layer.qkv.starts[1],
        VALUE=layer.qkv.starts[2],
        KV_HEADS=shape.kv_heads,
        GROUP=group,
        GROUP_BLOCK=max(16, _power_of_two(group)),
        DIM=shape.head_dimension,
        BLOCK=block,
        KEYS=KEYS,
        WINDOW=layer.window,
        STRETCHES=rows.stretches,
        **_options(qkv.device, 4),
    )
    _combine(model, layer, out, partial, extremes, rows)
    return out


def _mixed(model: DeviceModel, like: Tensor, stretches: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what heads attend to: the result, and where there are several stretches, what each of them finds."""
    shape, count = model.shape, like.shape[0]
    out = torch.empty((count, shape.heads * shape.head_dimension), dtype=like.dtype, device=like.device)
    split = (count, shape.heads, stretches) if stretches > 1 else (1, 1, 1)
    partial = torch.empty((*split, shape.head_dimension), dtype=torch.float32, device=like.device)
    return out, partial, torch.empty((*split, 2), dtype=torch.float32, device=like.device)


def _combine(model: DeviceModel, layer: Layer, out: Tensor, partial: Tensor, extremes: Tensor, rows: Rows) -> None:
    if rows.stretches == 1:
        return
    from otaro.engine.cuda.kernels import combine_kernel

    shape = model.shape
    combine_kernel[(out.shape[0], shape.heads)](
        *(rows.positions, partial, extremes, out),
        HEADS=shape.heads,
        DIM=shape.head_dimension,
        BLOCK=_block(rows.layout),
        KEYS=KEYS,
        WINDOW=layer.window,
        STRETCHES=rows.stretches,
        **_options(out.device, 2),
    )


def likeliest(logits: Tensor) -> Tensor:
    """The likeliest token of each row, `picking.NONE` where logits are not finite."""
    if not uses_triton(logits.device):
        return picking.greedy(logits)
    from otaro.engine.cuda.kernels import largest_kernel, likeliest_kernel

    rows, vocabulary = logits.shape
    parts = -(-vocabulary // _LARGEST_BLOCK)
    largest = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    largest_kernel[(rows, parts)](
        *(logits, largest, places),
        VOCABULARY=vocabulary,
        PARTS=parts,
        BLOCK=_LARGEST_BLOCK,
        **_options(logits.device, 4),
    )
    likeliest_kernel[(rows,)](
        *(largest, places, token),
        NONE=picking.NONE,
        PARTS=parts,
        BLOCK=_power_of_two(parts),
        **_options(logits.device, 1),
    )
    return token


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _block(layout: CacheLayout) -> int:
    """Dimensions of a head as tensor cores take them."""
    return max(16, _power_of_two(layout.dimension if layout.precision is None else layout.padded))
