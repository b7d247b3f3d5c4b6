"""What the kernels are called with: their arguments as C structures, and how a product is divided among blocks.

A product's work is tiles of 16 rows by units of 256 columns. A cluster of `split` blocks takes a range of tiles; each
of its blocks takes `warps` of the units side by side, all of its tiles, `tiles` of them at a time. :func:`plan` chooses
these by shape, batch and width; nothing else does.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otaro.ops.cuda.layout import ROWS, Fragments
from otaro.precision import NARROWEST, WIDEST

MOST_EXTRA = WIDEST.mantissa - NARROWEST.mantissa
MOST_BATCH = 16
"""The largest batch that one product takes."""
_SPLITS = (1, 2, 4, 7, 8)
MOST_SPLIT = _SPLITS[-1]
"""Blocks in a cluster that every GPU with clusters can hold."""
_UNIT_BYTES, _BIT_BYTES, _SCALE_BYTES = 2048, 512, 64
_HEAD_BYTES, _MOST_STAGES = 256, 16
_RESERVED = 1024
"""Bytes of shared memory that the system keeps of every block's."""
_STAGE_BYTES = 88 * 1024
"""At most what is copied at a time: warps wait for each other after every stage, so few large ones are quicker."""
_LEAST_STEPS = 2
"""Steps of a block that has enough tiles, so that it computes while it copies."""
_CLUSTER_WARPS = 8
"""Warps of a block where columns are divided: two such blocks share a multiprocessor, one computes while one waits."""


class CPlanes(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("bits", ctypes.c_void_p * MOST_EXTRA),
        ("scale", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("units", ctypes.c_int),
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
        ("split", ctypes.c_int),
        ("warps", ctypes.c_int),
        ("tiles_per_stage", ctypes.c_int),
        ("stage_memory", ctypes.c_int),
        ("share", ctypes.c_int),
        ("rest", ctypes.c_int),
        ("gated", ctypes.c_int),
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
    split: int
    warps: int
    tiles: int
    stages: int
    clusters: int
    extra: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stage_memory(self) -> int:
        return self.stages * self.tiles * self.warps * unit_bytes(self.extra)

    def shared_bytes(self, rows: int) -> int:
        """Shared memory of a block: barriers, stages, sums of the warps and, where columns are divided, results."""
        results = -(-_tiles(rows) // self.clusters) if self.split > 1 else 0
        sums = (2 * self.tiles * self.warps + results) * ROWS * self.columns * 4
        return _HEAD_BYTES + self.stage_memory + sums


def unit_bytes(extra: int) -> int:
    """Bytes of 16 rows × 256 columns at 3 + `extra` mantissa bits."""
    return _UNIT_BYTES + extra * _BIT_BYTES + _SCALE_BYTES


def kernel_columns(batch: int) -> int:
    """The batch of the kernel that serves a batch."""
    return 1 if batch == 1 else 8 if batch <= 8 else 16


def most_warps(columns: int) -> int:
    """Warps of a block that its registers suffice for."""
    return 8 if columns == MOST_BATCH else 16


def plan(
    rows: int,
    units: int,
    extra: int,
    batch: int,
    device: Device,
    *,
    split: int | None = None,
    tiles: int | None = None,
    blocks: int | None = None,
    most_clusters: int | None = None,
) -> Plan | None:
    """How to divide a product, or None where it has too many columns for the device.

    What is given is taken: clusters that can be at work at once, and choices that are being measured.
    """
    columns = kernel_columns(batch)
    limit = most_warps(columns)
    if split is None:
        # One block where the registers allow it, unless most multiprocessors would be left without work.
        split = 1 if units <= limit else next((s for s in _SPLITS if -(-units // s) <= _CLUSTER_WARPS), MOST_SPLIT)
        while split * 2 <= min(MOST_SPLIT, units) and _tiles(rows) * split * 4 <= device.processors:
            split *= 2
    warps = -(-units // split)
    if warps > limit or split > MOST_SPLIT:
        return None
    most = blocks or max(limit // warps, 1)
    for blocks in range(most, 0, -1):
        clusters = min(_tiles(rows), max(blocks * device.processors // split, 1), most_clusters or _tiles(rows))
        share = -(-_tiles(rows) // clusters)
        count = tiles or max(1, min(_STAGE_BYTES // (warps * unit_bytes(extra)), share // _LEAST_STEPS))
        room = device.shared // blocks - _RESERVED
        for stages in range(min(_MOST_STAGES, -(-share // count)), 0, -1):
            chosen = Plan(columns, split, warps, count, stages, clusters, extra)
            if chosen.shared_bytes(rows) <= room:
                return chosen
    # Results of so many tiles do not fit: more clusters, one after the other.
    return _in_waves(rows, Plan(columns, split, warps, 1, 1, clusters, extra), room)


def _in_waves(rows: int, chosen: Plan, room: int) -> Plan | None:
    """The same with as many clusters as make their results fit."""
    while chosen.shared_bytes(rows) > room:
        if chosen.clusters >= _tiles(rows):
            return None
        chosen = replace(chosen, clusters=min(2 * chosen.clusters, _tiles(rows)))
    return chosen


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


def matvec_call(
    x: Tensor,
    fragments: Fragments,
    extra: int,
    bias: Tensor | None,
    y: Tensor,
    chosen: Plan,
    mantissa: Tensor | None,
    gated: int = 0,
) -> CMatvec:
    return CMatvec(
        c_planes(fragments, extra),
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        None if mantissa is None else mantissa.data_ptr(),
        math.prod(x.shape[:-1]),
        int(x.dtype == torch.bfloat16),
        NARROWEST.mantissa + extra,
        chosen.split,
        chosen.warps,
        chosen.tiles,
        chosen.stage_memory,
        *divmod(_tiles(fragments.rows), chosen.clusters),
        gated,
    )


def decode_call(fragments: Fragments, extra: int, ids: Tensor | None, values: Tensor) -> CDecode:
    count = fragments.rows if ids is None else ids.numel()
    address = None if ids is None else ids.data_ptr()
    return CDecode(c_planes(fragments, extra), address, values.data_ptr(), count, extra, KINDS[values.dtype])


def _tiles(rows: int) -> int:
    return -(-rows // ROWS)
