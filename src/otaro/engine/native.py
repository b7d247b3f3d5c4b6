"""The C++ engine through ctypes: matrices re-laid for multiplication, and models of them.

Objects own their native counterparts and free them when they go. Sizes are checked on the other side; what it refuses
becomes one clear error here. A call lets other threads of Python run meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from otaro.engine.shape import MatrixRole, Shape, VectorRole
from otaro.errors import OtaroError, PrecisionError
from otaro.ops import cpu
from otaro.packing import Planes
from otaro.precision import NARROWEST, Precision
from otaro.sefp import Format

Logits = NDArray[numpy.float32]

_INT, _LONG, _DATA = cpu.INT, cpu.LONG, ctypes.c_void_p
NOT_FINITE_CODE, _PLANES, NO_MEMORY_CODE, CANCELLED = 3, 6, 7, 9
NOT_FINITE = "the model's logits are not finite: the packed weights are broken, see otaro verify"
NOT_LOADED = "that precision is not loaded: raise the model to it first"
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "otaro_arena_create": (_LONG, _DATA),
    "otaro_arena_destroy": (_DATA,),
    "otaro_matrix_size": (_DATA, _LONG, _LONG, _INT, _DATA),
    "otaro_matrix_create": (_DATA, _LONG, _LONG, _DATA),
    "otaro_matrix_destroy": (_DATA,),
    "otaro_matrix_set_base": (_DATA, _DATA, _DATA, _INT),
    "otaro_matrix_set_bit": (_DATA, _INT, _DATA, _LONG, _DATA, _INT),
    "otaro_matrix_bytes": (_DATA, _DATA),
    "otaro_matrix_multiply": (_DATA, _INT, _DATA, _LONG, _LONG, _DATA, _LONG, _DATA, _LONG, _INT, _INT, _INT),
    "otaro_model_create": (_DATA, _DATA),
    "otaro_model_destroy": (_DATA,),
    "otaro_model_set_matrix": (_DATA, _LONG, _INT, _DATA),
    "otaro_model_set_vector": (_DATA, _LONG, _INT, _DATA, _LONG),
    "otaro_session_create": (_DATA, _LONG, _INT, _DATA),
    "otaro_session_destroy": (_DATA,),
    "otaro_session_bytes": (_DATA, _DATA, _DATA),
    "otaro_session_release": (_DATA, _LONG),
    "otaro_session_copy": (_DATA, _DATA, _LONG),
    "otaro_cache_round": (_INT, _DATA, _LONG, _LONG, _LONG, _DATA, _LONG, _INT),
    "otaro_work_create": (_DATA, _INT, _DATA),
    "otaro_work_destroy": (_DATA,),
    "otaro_work_set_fine": (_DATA, _INT),
    "otaro_work_bytes": (_DATA, _DATA),
    "otaro_size": (_DATA, _INT, _LONG, _INT, _INT, _DATA, _DATA),
    "otaro_run": (_DATA, _DATA, _LONG, _LONG, _INT),
    "otaro_draft": (_DATA, _DATA, _INT, _LONG, _DATA, _LONG, _LONG, ctypes.c_float, _DATA, _LONG, _DATA, _INT),
    "otaro_sample": (
        *(_DATA, _DATA, _LONG, _LONG, _DATA, _LONG, _LONG, ctypes.c_uint64),
        *(_DATA, _LONG, _DATA, _LONG, _DATA, _LONG, _INT),
    ),
    "otaro_read": (_DATA, _LONG, _DATA, _INT),
}


class _CConfig(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "intermediate", "heads")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "head_dimension", "vocabulary")),
        ("norm_epsilon", ctypes.c_float),
        ("rope_factor", ctypes.c_float),
        ("rope_frequency", ctypes.c_void_p),
        ("rope_frequency_bytes", ctypes.c_int64),
        ("window", ctypes.c_void_p),
        ("window_bytes", ctypes.c_int64),
    )


class Arena:
    """Room for planes that come and go together, in one piece: it goes back to the system with the last of them."""

    def __init__(self, nbytes: int) -> None:
        self.handle = create(self, "otaro_arena", nbytes)


class Matrix:
    """A packed matrix in the engine's own memory. It takes copies: the planes given to it may go."""

    def __init__(
        self, planes: Planes, shape: Sequence[int], format: Format, threads: int, arena: Arena | None = None
    ) -> None:
        rows, self.columns = shape
        self.rows = rows
        self.group_size = format.group_size
        self._threads = threads
        format_ = cpu.c_format(format)
        self.handle = create(self, "otaro_matrix", ctypes.byref(format_), rows, self.columns)
        contiguous = Planes(planes.base.contiguous(), (), planes.scale.contiguous())
        home = None if arena is None else arena.handle
        check(library().otaro_matrix_set_base(self.handle, ctypes.byref(cpu.c_planes(contiguous)), home, threads))
        for bit, plane in enumerate(planes.bits, NARROWEST.mantissa + 1):
            self.set_bit(bit, plane, arena)

    def set_bit(self, bit: int, plane: Tensor, arena: Arena | None = None) -> None:
        """Take in the plane of one more bit."""
        data, home = plane.contiguous(), None if arena is None else arena.handle
        check(library().otaro_matrix_set_bit(self.handle, bit, data.data_ptr(), data.numel(), home, self._threads))

    def drop_bit(self, bit: int) -> None:
        """Free the plane of a bit, if it is there."""
        check(library().otaro_matrix_set_bit(self.handle, bit, None, 0, None, 1))

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the planes that are there."""
        value = ctypes.c_int64()
        check(library().otaro_matrix_bytes(self.handle, ctypes.byref(value)))
        return value.value

    def multiply(
        self, x: Tensor, precision: Precision, *, fine: bool = False, threads: int = 1, isa: str | None = None
    ) -> Tensor:
        """x [rows, columns] times the transposed matrix at a width, x rounded to 8 bits, or to 16 if `fine`."""
        x = x.to(torch.float32).contiguous()
        if x.dim() != 2 or x.shape[1] != self.columns:
            raise ValueError(f"x is of shape {list(x.shape)}: expected [rows, {self.columns}]")
        y = torch.empty((x.shape[0], self.rows))
        error = library().otaro_matrix_multiply(
            *(self.handle, precision.mantissa, x.data_ptr(), 4 * x.numel(), x.shape[0], None, 0),
            *(y.data_ptr(), 4 * y.numel(), fine, threads, cpu.isa_number(isa)),
        )
        check(error, f"precision {precision} is not loaded")
        return y


class Model:
    """Matrices and vectors put together. It keeps what it is given alive."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        frequency = numpy.array(shape.rope_frequency, dtype=numpy.float32)
        window = numpy.array(shape.window, dtype=numpy.int64)
        config = _CConfig(
            *(shape.layers, shape.hidden, shape.intermediate, shape.heads),
            *(shape.kv_heads, shape.head_dimension, shape.vocabulary),
            *(shape.norm_epsilon, shape.rope_factor),
            *(frequency.ctypes.data, frequency.nbytes, window.ctypes.data, window.nbytes),
        )
        self._matrices: dict[tuple[int, MatrixRole], Matrix] = {}
        self.handle = create(self, "otaro_model", ctypes.byref(config))

    @property
    def matrices(self) -> Mapping[tuple[int, MatrixRole], Matrix]:
        return self._matrices

    def set_matrix(self, layer: int, role: MatrixRole, matrix: Matrix) -> None:
        other = next((held.group_size for held in self._matrices.values()), matrix.group_size)
        if matrix.group_size != other:
            raise OtaroError(
                f"groups of {matrix.group_size} and of {other} weights cannot run in one model: pack all of it alike"
            )
        check(library().otaro_model_set_matrix(self.handle, layer, role, matrix.handle))
        self._matrices[layer, role] = matrix

    def set_vector(self, layer: int, role: VectorRole, values: Tensor) -> None:
        data = values.to(torch.float32).contiguous()
        check(library().otaro_model_set_vector(self.handle, layer, role, data.data_ptr(), 4 * data.numel()))


def matrix_size(shape: Sequence[int], format: Format, precision: Precision) -> int:
    """Bytes of memory that the planes of a matrix take which a width reads."""
    value = ctypes.c_int64()
    format_ = cpu.c_format(format)
    check(
        library().otaro_matrix_size(ctypes.byref(format_), *shape, precision.mantissa, ctypes.byref(value)),
    )
    return value.value


def free_heap() -> None:
    """Have the C library give back to the system what was freed and it keeps for later, where it can do that."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def read(data: NDArray[numpy.uint64], threads: int) -> int:
    """Read an array once from end to end, each thread a part of its own; the sum of its words."""
    total = ctypes.c_uint64()
    check(library().otaro_read(data.ctypes.data, data.nbytes, ctypes.byref(total), threads))
    return total.value


def round_keys(x: Tensor, precision: Precision, *, isa: str | None = None) -> Tensor:
    """What a cache of a width gives back for keys or values, [rows, head dimension]."""
    x = x.to(torch.float32).contiguous()
    y = torch.empty_like(x)
    error = library().otaro_cache_round(
        *(precision.mantissa, x.data_ptr(), 4 * x.numel(), x.shape[0], x.shape[1]),
        *(y.data_ptr(), 4 * y.numel(), cpu.isa_number(isa)),
    )
    check(error)
    return y


@functools.cache
def library() -> ctypes.CDLL:
    """The native library with the engine's functions declared."""
    loaded = cpu.library()
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, ctypes.c_int32
    return loaded


def create(owner: object, kind: str, *arguments: Any) -> ctypes.c_void_p:
    """A new native object, destroyed together with its owner.

    Not when the program ends, though: threads that are no longer waited for may still be in a call that uses it.
    """
    loaded = library()
    handle = ctypes.c_void_p()
    check(getattr(loaded, f"{kind}_create")(*arguments, ctypes.byref(handle)))
    weakref.finalize(owner, getattr(loaded, f"{kind}_destroy"), handle).atexit = False
    return handle


def check(error: int, planes: str = "a plane is missing") -> None:
    """The error that a call's code stands for, if it is one."""
    if error == NOT_FINITE_CODE:
        raise OtaroError(NOT_FINITE)
    if error == _PLANES:
        raise PrecisionError(planes)
    if error == NO_MEMORY_CODE:
        raise OtaroError("there is not enough memory: choose a smaller context or a lower precision")
    cpu.check(error)
