"""Matrices on a device: planes in fragment order, parts that are multiplied together below each other in one matrix.

Queries, keys and values are one product, gate and up another: few launches, and large ones, are what a GPU likes. Each
part begins at a multiple of 16 rows, the tiles of the kernels, so parts lie in the planes one after another as they
come from the files, and products have the gaps that this leaves. Gates and what they let through take turns, eight
rows each, so that a tile holds both and the product can be silu(gate) · up at once. Planes of one width share a piece
of memory, which is freed as a whole when the width is dropped.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from otaro.engine.cuda.launches import has_kernels, overlaps
from otaro.engine.shape import AnyMatrix
from otaro.errors import PrecisionError
from otaro.ops import cuda, reference
from otaro.ops.cuda import calls
from otaro.ops.cuda.layout import COLUMNS, ROWS, Fragments, fragments, to_planes
from otaro.packing import BASE, BITS, SCALE, Planes
from otaro.precision import NARROWEST, Precision
from otaro.sefp import Format

_ALIGNMENT = 256
_BYTES = {BASE: 2048, SCALE: 64, **dict.fromkeys(BITS.values(), 512)}
"""Bytes of a plane for 16 rows × 256 columns."""
TURN = ROWS // 2
"""Rows of gates, and then of what they let through."""


def _in_turns(rows: Tensor, place: int) -> Tensor:
    """[rows, …] with as many zeros behind (0) or before (1) every eight rows."""
    turns = functional.pad(rows, (0, 0, 0, -rows.shape[0] % TURN)).unflatten(0, (-1, 1, TURN))
    pair = (turns, torch.zeros_like(turns))
    return torch.cat(pair if place == 0 else pair[::-1], 1).flatten(0, 2)


class Product(ABC):
    """A matrix that activations are multiplied with, packed or not."""

    starts: Sequence[int]
    """The column of the product where each part begins."""
    columns: int

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory."""

    @abstractmethod
    def multiply(self, x: Tensor, mantissa: int) -> Tensor:
        """``x @ matrix.T`` plus the bias, [rows of x, rows]."""

    def gated(self, x: Tensor, mantissa: int) -> Tensor | None:
        """silu(gate) · up of a matrix of both, where that is one launch."""
        return None

    @abstractmethod
    def rows_of(self, ids: Tensor, mantissa: int, dtype: torch.dtype) -> Tensor:
        """Rows by their numbers, those of all leading dimensions counted through."""

    @abstractmethod
    def first(self, rows: int) -> Product:
        """The first rows alone, as a matrix of its own that shares the memory."""


class Arena:
    """Room for planes that come and go together, in one piece."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    def take(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        taken = self._memory[self._used : self._used + size].view(shape)
        self._used += arena_bytes(size)
        return taken


def arena_bytes(size: int) -> int:
    """Bytes that a plane takes of an arena."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class PackedMatrix(Product):
    """Planes of one or several parts; `shapes` have the rows of each, of several dimensions for experts.

    With `gates` there are two parts of equal shape, which take turns.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], format: Format, device: torch.device, *, gates: bool = False
    ) -> None:
        self.columns = shapes[0][-1]
        self.format, self.device = format, device
        counts = [math.prod(shape[:-1]) for shape in shapes]
        tiles = [-(-count // ROWS) for count in counts] if not gates else [-(-counts[0] // TURN), 0]
        self._gates = counts[0] if gates else 0
        self._first_tile = [sum(tiles[:place]) for place in range(len(tiles))]
        self.starts = [ROWS * tile for tile in self._first_tile] if not gates else [0, TURN]
        self.rows = counts[0] if len(counts) == 1 else ROWS * sum(tiles)
        self._tiles, self._units = sum(tiles), -(-self.columns // COLUMNS)
        self._planes: dict[str, Tensor] = {}
        self._ready: dict[int, Fragments] = {}
        self._values: dict[tuple[int, torch.dtype], Tensor] = {}  # for plain torch alone
        self.bias: Tensor | None = None
        self.parts = [Part(self, place, count) for place, count in enumerate(counts)]

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self._planes.values())

    def plane_shape(self, name: str) -> tuple[int, int, int]:
        return self._tiles, self._units, _BYTES[name]

    def put(self, name: str, plane: Tensor, place: int, arena: Arena | None) -> None:
        """Lay a plane of one of the parts where it belongs."""
        plane = plane.to(self.device)
        if name not in self._planes:
            shape = self.plane_shape(name)
            self._planes[name] = (Arena(math.prod(shape), self.device) if arena is None else arena).take(shape)
            if self._gates:
                self._planes[name].zero_()
        if self._gates:
            self._planes[name] |= fragments(name, _in_turns(plane, place), self.format)
        else:
            laid, start = fragments(name, plane, self.format), self._first_tile[place]
            self._planes[name][start : start + laid.shape[0]] = laid
        self._forget()

    def set_bias(self, place: int, values: Tensor) -> None:
        """The bias of one of the parts."""
        if self.bias is None:
            self.bias = torch.zeros(self.rows, dtype=values.dtype, device=values.device)
        if self._gates:
            self.bias += _in_turns(values[:, None], place)[:, 0]
        else:
            self.bias[self.starts[place] :][: len(values)] = values

    def set_plane(self, name: str, laid: Tensor) -> None:
        """Take a plane of all parts that lies as it shall."""
        self._planes[name] = laid
        self._forget()

    def drop(self, name: str) -> None:
        if self._planes.pop(name, None) is not None:
            self._forget()

    def _forget(self) -> None:
        self._ready.clear()
        self._values.clear()

    def fragments(self, mantissa: int) -> Fragments:
        """The planes that a width reads."""
        if mantissa not in self._ready:
            names = [name for bit, name in BITS.items() if bit <= mantissa]
            if any(name not in self._planes for name in names):
                raise PrecisionError("that precision is not loaded: raise the model to it first")
            bits = tuple(self._planes[name] for name in names)
            self._ready[mantissa] = Fragments(
                self._planes[BASE], bits, self._planes[SCALE], (self.rows, self.columns), self.format.group_size
            )
        return self._ready[mantissa]

    def multiply(self, x: Tensor, mantissa: int) -> Tensor:
        if not self._multiplies(x):
            return functional.linear(x, self._value(mantissa, x.dtype), self.bias)
        planes = self.fragments(mantissa)
        product = cuda.multiply(x, planes, planes.stored, self.bias, overlaps(self.device))
        if product is None:
            return functional.linear(x, cuda.dequantize(planes, planes.stored, x.dtype), self.bias)
        return product

    def gated(self, x: Tensor, mantissa: int) -> Tensor | None:
        if not self._multiplies(x):
            return None
        planes = self.fragments(mantissa)
        return cuda.multiply(x, planes, planes.stored, self.bias, overlaps(self.device), self._gates)

    def _multiplies(self, x: Tensor) -> bool:
        return has_kernels(self.device) and x.dtype != torch.float32

    def rows_of(self, ids: Tensor, mantissa: int, dtype: torch.dtype) -> Tensor:
        if has_kernels(self.device):
            return cuda.embedding(ids, self.fragments(mantissa), Precision.from_mantissa(mantissa), dtype)
        return self._value(mantissa, dtype)[ids]

    def _value(self, mantissa: int, dtype: torch.dtype) -> Tensor:
        """All values, in plain torch, and kept: a small model on a CPU is all that comes here."""
        if (mantissa, dtype) not in self._values:
            precision = Precision.from_mantissa(mantissa)
            planes = to_planes(self.fragments(mantissa), self.format)
            value = reference.dequantize(planes, self.columns, precision, self.format, dtype)
            self._values[mantissa, dtype] = value
        return self._values[mantissa, dtype]

    def first(self, rows: int) -> PackedMatrix:
        shared = PackedMatrix([(rows, self.columns)], self.format, self.device)
        shared._planes = {name: plane[: shared._tiles] for name, plane in self._planes.items()}
        return shared


class Part(AnyMatrix):
    """One of the parts of a matrix, which its planes are given to."""

    def __init__(self, whole: PackedMatrix, place: int, rows: int) -> None:
        self.whole, self.rows, self.columns = whole, rows, whole.columns
        self._place = place

    @property
    def nbytes(self) -> int:
        """This part's share of the planes that are there."""
        rows = -(-self.rows // TURN) * TURN if self.whole._gates else -(-self.rows // ROWS) * ROWS
        return sum(rows * self.whole._units * _BYTES[name] // ROWS for name in self.whole._planes)

    def set_planes(self, planes: Planes, arena: Arena | None) -> None:
        for name, plane in planes.named().items():
            self.whole.put(name, plane, self._place, arena)

    def set_bit(self, bit: int, plane: Tensor, arena: Arena | None = None) -> None:
        self.whole.put(BITS[bit], plane, self._place, arena)

    def drop_bit(self, bit: int) -> None:
        self.whole.drop(BITS[bit])


class DenseMatrix(Product):
    """Weights as they are, for measuring what packed ones gain: the product is cuBLAS's."""

    def __init__(self, weight: Tensor, starts: Sequence[int] = (0,)) -> None:
        self.weight, self.starts = weight, starts
        self.bias: Tensor | None = None
        self.rows, self.columns = weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def multiply(self, x: Tensor, mantissa: int) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def rows_of(self, ids: Tensor, mantissa: int, dtype: torch.dtype) -> Tensor:
        return self.weight[ids].to(dtype)

    def first(self, rows: int) -> DenseMatrix:
        return DenseMatrix(self.weight[:rows])


def plane_names(width: Precision) -> list[str]:
    """The planes that come with a width's file, of a weight without a floor."""
    return [BASE, SCALE] if width == NARROWEST else [BITS[width.mantissa]]


def planes_bytes(shape: Sequence[int], precision: Precision) -> int:
    """Bytes that a matrix takes on a device, its planes up to a width."""
    tiles, units = -(-math.prod(shape[:-1]) // ROWS), -(-shape[-1] // COLUMNS)
    return tiles * units * calls.unit_bytes(precision.mantissa - NARROWEST.mantissa)
