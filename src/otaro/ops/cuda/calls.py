"""What the kernels are called with: their arguments as C structures, and how a product is divided among blocks.

A product's work is tiles of 16 rows by units of 256 columns. A block takes a range of tiles, `warps` units of them side
by side, in `rounds` where there are more. Bytes come in stages of `tiles` tiles.
:func:`plan` chooses these by shape, batch and width; nothing else does.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from otaro.ops.cuda.layout import COLUMNS, ROWS, Fragments
from otaro.precision import NARROWEST, WIDEST

MOST_EXTRA = WIDEST.mantissa - NARROWEST.mantissa
MOST_BATCH, MOST_COLUMNS = 16, 32768
"""The largest batch that one product takes, and the most columns."""
_UNIT_BYTES, _BIT_BYTES, _SCALE_BYTES = 2048, 512, 64
_MOST_STAGES, _MOST_SUMS = 16, 16
_HEAD_BYTES = 1024
_RESERVED = 1024
"""Bytes of shared memory that the system keeps of every block's."""
_STAGE_BYTES = 40 * 1024
"""At most what is copied at a time, so that work begins soon and stages are filled again soon."""
_SUMS = 4
"""Stages whose sums there is room for, so that warps need not wait until they are summed up."""
_SUMS_BYTES = 32 * 1024
"""At most what sums take that wait for further rounds."""


class CPlanes(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("bits", ctypes.c_void_p * MOST_EXTRA),
        ("scale", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("units", ctypes.c_int),
    )


class CStream(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("inverse", ctypes.c_float),
        ("bfloat", ctypes.c_int),
    )


class CNorm(ctypes.Structure):
    _fields_ = (
        ("stream", CStream),
        ("out", ctypes.c_void_p),
        ("columns", ctypes.c_int),
        ("bfloat", ctypes.c_int),
    )


class CMatvec(ctypes.Structure):
    _fields_ = (
        ("planes", CPlanes),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("mantissa", ctypes.c_void_p),
        ("batch", ctypes.c_int),
        ("bfloat", ctypes.c_int),
        ("stored", ctypes.c_int),
        ("warps", ctypes.c_int),
        ("rounds", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("stages", ctypes.c_int),
        ("stage_memory", ctypes.c_int),
        ("sums", ctypes.c_int),
        ("lag", ctypes.c_int),
        ("warm", ctypes.c_int),
        ("share", ctypes.c_int),
        ("rest", ctypes.c_int),
        ("gated", ctypes.c_int),
        ("stream", CStream),
    )


class CDecode(ctypes.Structure):
    _fields_ = (
        ("planes", CPlanes),
        ("ids", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
        ("extra", ctypes.c_int),
        ("kind", ctypes.c_int),
    )


KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


@dataclass(frozen=True)
class Device:
    """What a plan depends on: multiprocessors, and bytes of shared memory of each."""

    processors: int
    shared: int


@dataclass(frozen=True)
class Plan:
    """How a product is divided: see the head of this module. `columns` is the batch the kernel is made for."""

    columns: int
    warps: int
    rounds: int
    tiles: int
    stages: int
    sums: int
    lag: int
    warm: int
    blocks: int
    extra: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stage_memory(self) -> int:
        return self.stages * self.tiles * self.warps * unit_bytes(self.extra)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: barriers, stages, sums of the warps."""
        return _HEAD_BYTES + self.stage_memory + self.sums * self.tiles * self.warps * ROWS * self.columns * 4


def unit_bytes(extra: int) -> int:
    """Bytes of 16 rows × 256 columns at 3 + `extra` mantissa bits."""
    return _UNIT_BYTES + extra * _BIT_BYTES + _SCALE_BYTES


def kernel_columns(batch: int) -> int:
    """The batch of the kernel that serves a batch."""
    return 1 if batch == 1 else 8 if batch <= 8 else 16


def most_warps(columns: int) -> int:
    """Warps of a block that its registers suffice for."""
    return 8 if columns == MOST_BATCH else 16


def most_threads(columns: int) -> int:
    return 32 * most_warps(columns)


def plan(
    rows: int,
    units: int,
    extra: int,
    batch: int,
    device: Device,
    *,
    tiles: int | None = None,
    blocks: int | None = None,
    sums: int | None = None,
    stages: int | None = None,
    lag: int | None = None,
    warm: int = 1,
) -> Plan | None:
    """How to divide a product, or None where the device cannot hold as much.

    What is given is taken, for measuring other choices; `blocks` are those of a multiprocessor.
    """
    columns = kernel_columns(batch)
    limit = most_warps(columns)
    if units > MOST_COLUMNS // COLUMNS:
        return None
    rounds = -(-units // limit)
    warps = -(-units // rounds)
    unit = unit_bytes(extra)
    for each in range(blocks or max(limit // warps, 1), 0, -1):
        count = min(_tiles(rows), each * device.processors)
        share = -(-_tiles(rows) // count)
        room = device.shared // each - _RESERVED
        together = tiles or max(1, min(min(_STAGE_BYTES, room // 3) // (warps * unit), share // 2))
        if rounds > 1:
            together = 1
        steps = -(-share // together)
        kept = sums or (_SUMS if rounds == 1 else max(_SUMS, _SUMS_BYTES // (warps * ROWS * columns * 4)))
        kept = 1 << min(kept, _MOST_SUMS).bit_length() - 1
        while kept >= 2 * steps:
            kept //= 2
        for some in range(min(stages or _MOST_STAGES, steps * rounds), 0, -1):
            for fewer in (kept, 1)[: 1 if some > 1 else 2]:
                later = min(lag or (2 if some > 3 else 1), some, fewer, steps * rounds)
                chosen = Plan(columns, warps, rounds, together, some, fewer, later, warm, count, extra)
                if chosen.shared_bytes <= room:
                    return chosen
    return None


def c_planes(fragments: Fragments, extra: int) -> CPlanes:
    addresses = [plane.data_ptr() for plane in fragments.bits[:extra]]
    return CPlanes(
        fragments.base.data_ptr(),
        (ctypes.c_void_p * MOST_EXTRA)(*addresses),
        fragments.scale.data_ptr(),
        fragments.rows,
        fragments.columns,
        fragments.base.shape[1],
    )


@dataclass(frozen=True)
class Stream:
    """The residual stream in float32, the last product, which is to be added to it, and the norm that follows.

    `sum` is where the new stream is kept, which may be where the old one is if a norm alone is made.
    """

    x: Tensor
    delta: Tensor | None
    weight: Tensor
    sum: Tensor
    epsilon: float

    @property
    def fits(self) -> bool:
        """Whether rows are of whole fours, as kernels read them."""
        columns = self.x.shape[-1]
        tensors = (self.x, self.weight, self.sum, *(() if self.delta is None else (self.delta,)))
        return columns % 4 == 0 and columns <= MOST_COLUMNS and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _stream(stream: Stream | None) -> CStream:
    if stream is None:
        return CStream()
    delta = stream.delta
    return CStream(
        stream.x.data_ptr(),
        None if delta is None else delta.data_ptr(),
        stream.weight.data_ptr(),
        stream.sum.data_ptr(),
        stream.epsilon,
        1 / stream.x.shape[-1],
        int(delta is not None and delta.dtype == torch.bfloat16),
    )


def norm_call(stream: Stream, out: Tensor) -> CNorm:
    return CNorm(_stream(stream), out.data_ptr(), out.shape[-1], int(out.dtype == torch.bfloat16))


def matvec_call(
    x: Tensor,
    fragments: Fragments,
    extra: int,
    bias: Tensor | None,
    y: Tensor,
    chosen: Plan,
    mantissa: Tensor | None,
    gated: int = 0,
    stream: Stream | None = None,
) -> CMatvec:
    """`x` is what the kernel reads or, of a `stream`, of the type and shape of its norm."""
    return CMatvec(
        c_planes(fragments, extra),
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        None if mantissa is None else mantissa.data_ptr(),
        math.prod(x.shape[:-1]),
        int(x.dtype == torch.bfloat16),
        NARROWEST.mantissa + extra,
        chosen.warps,
        chosen.rounds,
        chosen.tiles,
        chosen.stages,
        chosen.stage_memory,
        chosen.sums,
        chosen.lag,
        chosen.warm,
        *divmod(_tiles(fragments.rows), chosen.blocks),
        gated,
        _stream(stream),
    )


def decode_call(fragments: Fragments, extra: int, ids: Tensor | None, values: Tensor) -> CDecode:
    count = fragments.rows if ids is None else ids.numel()
    address = None if ids is None else ids.data_ptr()
    return CDecode(c_planes(fragments, extra), address, values.data_ptr(), count, extra, KINDS[values.dtype])


def _tiles(rows: int) -> int:
    return -(-rows // ROWS)
