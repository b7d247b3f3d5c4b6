"""The shape of a model that the engine runs, and what its tensors are in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class MatrixRole(IntEnum):
    """What a matrix is in a model, as the C ABI numbers it."""

    EMBEDDING = 0
    HEAD = 1
    QUERY = 2
    KEY = 3
    VALUE = 4
    OUTPUT = 5
    GATE = 6
    UP = 7
    DOWN = 8


class VectorRole(IntEnum):
    """What a vector is in a model, as the C ABI numbers it."""

    FINAL_NORM = 0
    ATTENTION_NORM = 1
    FEED_FORWARD_NORM = 2
    QUERY_NORM = 3
    KEY_NORM = 4
    QUERY_BIAS = 5
    KEY_BIAS = 6
    VALUE_BIAS = 7
    OUTPUT_BIAS = 8
    GATE_BIAS = 9
    UP_BIAS = 10
    DOWN_BIAS = 11


@dataclass(frozen=True)
class Shape:
    """What the engine must know of a model besides its weights; `window` has an entry a layer, 0 for none."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dimension: int
    vocabulary: int
    norm_epsilon: float
    rope_frequency: tuple[float, ...]
    rope_factor: float
    window: tuple[int, ...]
