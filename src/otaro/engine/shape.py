"""The shape of a model that the engine runs, and what its tensors are in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol


class MatrixRole(IntEnum):
    """What a matrix is in a model, as the C ABI numbers it; experts run on GPUs alone."""

    EMBEDDING = 0
    HEAD = 1
    QUERY = 2
    KEY = 3
    VALUE = 4
    OUTPUT = 5
    GATE = 6
    UP = 7
    DOWN = 8
    EXPERT_GATE_UP = 9
    EXPERT_DOWN = 10


class VectorRole(IntEnum):
    """What a vector is in a model, as the C ABI numbers it; the router of experts is a matrix that is not packed."""

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
    ROUTER = 12


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
    experts: int = 0
    expert_intermediate: int = 0
    experts_per_token: int = 0
    experts_normalized: bool = True
    """Whether the weights of the experts chosen for a token add up to one."""


class AnyMatrix(Protocol):
    """A packed matrix in memory, on whatever device."""

    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the planes that are there."""

    def set_bit(self, bit: int, plane: Any, arena: Any = None) -> None:
        """Take in the plane of one more bit."""

    def drop_bit(self, bit: int) -> None:
        """Free the plane of a bit, if it is there."""


class AnyModel(Protocol):
    """Matrices and vectors put together, on whatever device."""

    shape: Shape

    @property
    def matrices(self) -> Mapping[tuple[int, MatrixRole], AnyMatrix]:
        """By layer and role."""
