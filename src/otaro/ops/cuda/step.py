"""How the kernel of a whole step is called: `step.cu` says what it does."""

from __future__ import annotations

import ctypes

from otaro.ops.cuda.calls import MOST_BATCH, CPlanes, Device, kernel_columns, unit_bytes

MATRICES = 4
"""Of a layer: query with key and value, output, gate with up, down."""
MOST_DIMENSION = 256
_SLOT_UNITS, _MOST_SLOTS, _LEAST_SLOTS = 8, 16, 2
_HEAD_BYTES, _STAGE_BYTES, _SUMS_BYTES, _RESERVED = 2048, 8192, 32768, 1024
_COPIERS = 4
_FIRST_COUNTERS = 2


class CSize(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int), ("columns", ctypes.c_int), ("units", ctypes.c_int))


class CStep(ctypes.Structure):
    _fields_ = (
        ("planes", ctypes.c_void_p),
        ("head", CPlanes),
        ("bias", ctypes.c_void_p * MATRICES),
        *((name, ctypes.c_void_p) for name in ("norms", "final_norm", "query_norms", "key_norms", "frequency")),
        *((name, ctypes.c_void_p) for name in ("windows", "positions", "addresses", "room")),
        *((name, ctypes.c_void_p) for name in ("x", "qkv", "partial", "extremes", "mixed", "inner", "logits")),
        ("counters", ctypes.c_void_p),
        ("size", CSize * MATRICES),
        *((name, ctypes.c_int) for name in ("layers", "batch", "bfloat", "hidden", "intermediate", "heads")),
        *((name, ctypes.c_int) for name in ("kv_heads", "dimension", "key_row", "value_row", "stretches", "slots")),
        ("epsilon", ctypes.c_float),
        ("rope_factor", ctypes.c_float),
    )


def counters(kv_heads: int) -> int:
    """How many zeros the kernel needs, and leaves as zeros."""
    return _FIRST_COUNTERS + MOST_BATCH * kv_heads


def threads(batch: int) -> int:
    return 32 * ((8 if kernel_columns(batch) == MOST_BATCH else 16) + _COPIERS)


def slots(extra: int, batch: int, dimension: int, device: Device) -> int:
    """Slots of the ring for the wider of layers and head, 0 where there is too little shared memory."""
    left = device.shared - _RESERVED - shared_bytes(0, extra, batch, dimension)
    count = left // (_SLOT_UNITS * unit_bytes(extra))
    return min(count, _MOST_SLOTS) if count >= _LEAST_SLOTS else 0


def shared_bytes(slots: int, extra: int, batch: int, dimension: int) -> int:
    angles = -(-4 * batch * dimension // 128) * 128
    return _HEAD_BYTES + _STAGE_BYTES + _SUMS_BYTES + angles + slots * _SLOT_UNITS * unit_bytes(extra)
