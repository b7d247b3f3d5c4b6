"""The native core: the codec and a small matrix product in C++, loaded through ctypes.

Same results as :mod:`otaro.sefp` and :mod:`otaro.packing`, bit for bit, on every instruction set the library carries
(`linear` apart, whose sums may differ in the last bits). It picks the best one of the machine; `isa` forces another.
Work is spread over as many threads as torch uses. Tensors lie on the CPU, with any strides and leading dimensions.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import otaro
from otaro import sefp
from otaro.errors import FormatError, OtaroError, PrecisionError
from otaro.packing import Planes, padded_columns, plane_shapes
from otaro.precision import NARROWEST, WIDEST, Precision
from otaro.sefp import Codes, Format, Tiers

ABI_VERSION = 8
LIBRARY_NAME = "libotaro_core.so"
LIBRARY_VARIABLE = "OTARO_NATIVE_LIBRARY"

_ISAS = ("auto", "reference", "avx2", "avx512", "neon")
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BIT_PLANES = WIDEST.mantissa - NARROWEST.mantissa
_MAX_THREADS = 1024
_NOT_FINITE, _INDEX, _SCALE = 3, 4, 8
_ERRORS = {1: "an invalid argument", 2: "a buffer that is too small", 7: "no memory left"}


class _CFormat(ctypes.Structure):
    _fields_ = (("scheme", ctypes.c_int32), ("group_size", ctypes.c_int32))


class _CPlanes(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("base_bytes", ctypes.c_int64),
        ("bits", ctypes.c_void_p * _BIT_PLANES),
        ("bits_bytes", ctypes.c_int64 * _BIT_PLANES),
        ("bits_count", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("scale_bytes", ctypes.c_int64),
    )


class _CCodes(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_void_p),
        ("code_bytes", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("scale_bytes", ctypes.c_int64),
    )


class _CTiers(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p * len(Precision)),
        ("weight_bytes", ctypes.c_int64 * len(Precision)),
        ("mantissa", ctypes.c_int32 * len(Precision)),
        ("count", ctypes.c_int32),
    )


def _checked(kind: type[ctypes.c_int32] | type[ctypes.c_int64]) -> Any:
    """A C integer as the type of an argument: ctypes alone would cut what does not fit without a word."""
    bits = 8 * ctypes.sizeof(kind)

    class Checked:
        @staticmethod
        def from_param(value: Any) -> Any:
            number = operator.index(value)
            if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
                raise OverflowError(f"an integer of {number.bit_length()} bits does not fit into {bits}")
            return kind(number)

    return Checked


INT, LONG = _checked(ctypes.c_int32), _checked(ctypes.c_int64)
_INT, _LONG, _DATA, _STRUCT = INT, LONG, ctypes.c_void_p, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "otaro_abi_version": (),
    "otaro_isa_supported": (_INT,),
    "otaro_best_isa": (),
    "otaro_scales": (_STRUCT, _LONG, _LONG, _DATA, _LONG, _INT, _DATA, _LONG, _INT, _INT),
    "otaro_encode": (_STRUCT, _LONG, _LONG, _DATA, _LONG, _INT, _INT, _DATA, _LONG, _STRUCT, _DATA, _INT, _INT),
    "otaro_decode": (_STRUCT, _LONG, _LONG, _STRUCT, _INT, _DATA, _LONG, _INT, _INT, _INT),
    "otaro_truncate": (_INT, _LONG, _DATA, _LONG, _INT, _INT, _DATA, _LONG, _INT, _INT),
    "otaro_pack": (_STRUCT, _LONG, _LONG, _DATA, _LONG, _INT, _DATA, _LONG, _STRUCT, _DATA, _DATA, _INT, _INT),
    "otaro_dequantize": (_STRUCT, _LONG, _LONG, _STRUCT, _INT, _DATA, _LONG, _INT, _INT, _INT),
    "otaro_quantize": (
        *(_STRUCT, _LONG, _LONG, _DATA, _LONG, _INT, _INT, _STRUCT, _DATA, _LONG),
        *(_DATA, _LONG, _INT, _INT),
    ),
    "otaro_rows": (_STRUCT, _LONG, _LONG, _STRUCT, _INT, _DATA, _LONG, _LONG, _DATA, _LONG, _INT, _INT, _INT),
    "otaro_linear": (
        *(_STRUCT, _LONG, _LONG, _STRUCT, _INT, _DATA, _LONG, _LONG),
        *(_DATA, _LONG, _DATA, _LONG, _INT, _INT),
    ),
}


def available() -> str | None:
    """None if the library can be used, otherwise why not."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def library() -> ctypes.CDLL:
    """The loaded library, its functions declared; an error that says why if there is none."""
    loaded = _load()
    if isinstance(loaded, str):
        raise OtaroError(loaded)
    return loaded


def isa() -> str:
    """The instruction set that runs when none is asked for."""
    return _ISAS[library().otaro_best_isa()]


def isas() -> list[str]:
    """All instruction sets that this machine and this build have."""
    return [name for number, name in enumerate(_ISAS) if number and library().otaro_isa_supported(number)]


def scales(weight: Tensor, format: Format, *, isa: str | None = None) -> Tensor:
    """The scale of every group of a tensor. Weights are taken to be finite."""
    weight = _contiguous(weight)
    scale = torch.empty(_scale_shape(weight, format), dtype=torch.uint8)
    error = library().otaro_scales(*_c_weight(weight, format), *_data(scale), _threads(), isa_number(isa))
    check(error)
    return scale


def pack(
    weight: Tensor, format: Format, scale: Tensor | None = None, *, isa: str | None = None
) -> tuple[Planes, Tensor]:
    """The planes of a tensor's E5M8 codes, and int64 [2]: groups whose exponent was below and above the range."""
    weight = _checked_weight(weight)
    scale = _checked_scale(scale, weight, format)
    shapes = plane_shapes(tuple(weight.shape), format)
    planes = Planes.from_named({name: torch.empty(shape, dtype=torch.uint8) for name, shape in shapes.items()})
    clamped = torch.zeros(2, dtype=torch.int64)
    index = ctypes.c_int64(-1)
    error = library().otaro_pack(
        *(*_c_weight(weight, format), *_optional(scale), ctypes.byref(c_planes(planes))),
        *(clamped.data_ptr(), ctypes.byref(index), _threads(), isa_number(isa)),
    )
    if error == _NOT_FINITE:
        raise sefp.not_finite(weight, index.value)
    check(error)
    return planes, clamped


def dequantize(
    planes: Planes, columns: int, precision: Precision, format: Format, dtype: torch.dtype, *, isa: str | None = None
) -> Tensor:
    """The values of a packed tensor at a width."""
    planes, rows = _checked_planes(planes, columns, precision, format)
    value = torch.empty((*planes.base.shape[:-1], columns), dtype=dtype)
    error = library().otaro_dequantize(
        *(*_c_packed(planes, rows, columns, precision, format), *_data(value), _dtype(dtype)),
        *(_threads(), isa_number(isa)),
    )
    check(error)
    return value


def quantize(
    weight: Tensor,
    precision: Precision,
    format: Format,
    tiers: Tiers = (),
    scale: Tensor | None = None,
    *,
    isa: str | None = None,
) -> Tensor:
    """The values a tensor's weights have at a width, in its own dtype. Weights are taken to be finite."""
    weight = _contiguous(weight)
    scale = _checked_scale(scale, weight, format)
    value = torch.empty_like(weight)
    listed = [(width, _contiguous(tier)) for width, tier in tiers]
    if any(tier.shape != weight.shape or tier.dtype != weight.dtype for _, tier in listed):
        raise TypeError(f"tiers must be {weight.dtype} of shape {list(weight.shape)}, as the weight is")
    error = library().otaro_quantize(
        *(*_c_weight(weight, format), precision.mantissa, ctypes.byref(_c_tiers(listed)) if listed else None),
        *(*_optional(scale), *_data(value), _threads(), isa_number(isa)),
    )
    check(error)
    return value


def linear(
    x: Tensor,
    planes: Planes,
    columns: int,
    precision: Precision,
    format: Format,
    bias: Tensor | None = None,
    *,
    isa: str | None = None,
) -> Tensor:
    """x times the transpose of a packed matrix at a width, plus the bias, in float32; x is [..., columns].

    For a few rows of x: the weights are decoded anew for every 16 of them.
    """
    if x.dtype != torch.float32 or x.shape[-1] != columns:
        raise TypeError(f"x is {x.dtype} of shape {list(x.shape)}: expected float32 with {columns} columns")
    if bias is not None and bias.dtype != torch.float32:
        raise TypeError(f"the bias is {bias.dtype}: expected float32")
    planes, rows = _checked_planes(planes, columns, precision, format)
    x = _contiguous(x)
    bias = None if bias is None else _contiguous(bias)
    y = torch.empty((*x.shape[:-1], rows), dtype=torch.float32)
    error = library().otaro_linear(
        *(*_c_packed(planes, rows, columns, precision, format), *_data(x), _rows(x), *_optional(bias)),
        *(*_data(y), _threads(), isa_number(isa)),
    )
    check(error)
    return y


def embedding(
    ids: Tensor,
    planes: Planes,
    columns: int,
    precision: Precision,
    format: Format,
    dtype: torch.dtype,
    *,
    isa: str | None = None,
) -> Tensor:
    """Rows of a packed matrix at a width: ids of any shape give [..., columns]."""
    planes, rows = _checked_planes(planes, columns, precision, format)
    ids = _contiguous(ids.to(torch.int64))
    value = torch.empty((*ids.shape, columns), dtype=dtype)
    error = library().otaro_rows(
        *(*_c_packed(planes, rows, columns, precision, format), *_data(ids), ids.numel()),
        *(*_data(value), _dtype(dtype), _threads(), isa_number(isa)),
    )
    if error == _INDEX:
        raise IndexError(f"ids from {int(ids.min())} to {int(ids.max())} reach outside the {rows} rows of the table")
    check(error)
    return value


def encode(
    weight: Tensor, precision: Precision, format: Format, scale: Tensor | None = None, *, isa: str | None = None
) -> Codes:
    """The codes of a tensor at a width."""
    weight = _checked_weight(weight)
    scale = _checked_scale(scale, weight, format)
    code = torch.empty(weight.shape, dtype=torch.int16)
    codes = Codes(code, torch.empty(_scale_shape(weight, format), dtype=torch.uint8), precision, format)
    index = ctypes.c_int64(-1)
    error = library().otaro_encode(
        *(*_c_weight(weight, format), precision.mantissa, *_optional(scale)),
        *(ctypes.byref(_c_codes(codes)), ctypes.byref(index), _threads(), isa_number(isa)),
    )
    if error == _NOT_FINITE:
        raise sefp.not_finite(weight, index.value)
    check(error)
    return codes


def decode(codes: Codes, dtype: torch.dtype = torch.float32, *, isa: str | None = None) -> Tensor:
    """The values the codes stand for."""
    format, columns = codes.format, codes.code.shape[-1]
    codes = Codes(_contiguous(codes.code), _contiguous(codes.scale), codes.precision, format)
    value = torch.empty(codes.code.shape, dtype=dtype)
    error = library().otaro_decode(
        *(ctypes.byref(c_format(format)), _rows(codes.code), columns, ctypes.byref(_c_codes(codes))),
        *(codes.precision.mantissa, *_data(value), _dtype(dtype), _threads(), isa_number(isa)),
    )
    check(error)
    return value


def truncate(codes: Codes, precision: Precision, *, isa: str | None = None) -> Codes:
    """Codes at a narrower width."""
    if precision > codes.precision:
        raise FormatError(f"codes of {codes.precision} cannot be widened to {precision}")
    code = _contiguous(codes.code)
    result = torch.empty_like(code)
    error = library().otaro_truncate(
        *(sefp.SCHEMES.index(codes.format.scheme), code.numel(), *_data(code)),
        *(codes.precision.mantissa, precision.mantissa, *_data(result), _threads(), isa_number(isa)),
    )
    check(error)
    return Codes(result, codes.scale, precision, codes.format)


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    override = os.environ.get(LIBRARY_VARIABLE)
    paths = [Path(override)] if override else [Path(folder) / LIBRARY_NAME for folder in otaro.__path__]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return f"the native library is missing: looked for {', '.join(map(str, paths))}; install the package again"
    try:
        loaded = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, ctypes.c_int32
    except (OSError, AttributeError) as error:
        return f"the native library {path} cannot be loaded ({error}): install the package again"
    version = loaded.otaro_abi_version()
    if version != ABI_VERSION:
        return f"the native library {path} has version {version} instead of {ABI_VERSION}: install the package again"
    return loaded


def isa_number(name: str | None) -> int:
    if name is None:
        return 0
    if name not in isas():
        raise ValueError(f"instruction set {name!r} is not at hand: choose from {', '.join(isas())}")
    return _ISAS.index(name)


def check(error: int) -> None:
    if error == _SCALE:
        raise FormatError("the tensor's scales hold a byte that is no scale: fetch its file again")
    if error:
        raise RuntimeError(f"the native library refused a call: {_ERRORS.get(error, f'error {error}')}")


def _threads() -> int:
    return min(torch.get_num_threads(), _MAX_THREADS)


def _dtype(dtype: torch.dtype) -> int:
    if dtype not in _DTYPES:
        raise TypeError(f"values are float32, float16 or bfloat16, not {dtype}")
    return _DTYPES[dtype]


def _contiguous(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise TypeError(f"the native library works on the CPU, not on {tensor.device}")
    return tensor.detach().contiguous()


def _checked_weight(weight: Tensor) -> Tensor:
    if weight.dtype not in sefp.WEIGHT_DTYPES or weight.dim() == 0 or weight.numel() == 0:
        sefp.check_weight(weight)
    return _contiguous(weight)


def _checked_planes(planes: Planes, columns: int, precision: Precision, format: Format) -> tuple[Planes, int]:
    """The planes a width reads, contiguous and as large as they must be, and the number of rows."""
    stored = format.stored(precision)
    if planes.stored < stored:
        raise PrecisionError(f"{precision} needs the bits of {stored}, but the planes hold those of {planes.stored}")
    needed = planes.up_to(stored)
    used = Planes(_contiguous(needed.base), tuple(map(_contiguous, needed.bits)), _contiguous(needed.scale))
    *leading, width = used.base.shape
    if width != padded_columns(columns, format) // 2:
        raise FormatError(f"planes of {2 * width} weights a row do not belong to a tensor of {columns} columns")
    shapes = plane_shapes((*leading, columns), format)
    for name, plane in used.named().items():
        _check_shape(name, plane, shapes[name])
    return used, _rows(used.base)


def _checked_scale(scale: Tensor | None, weight: Tensor, format: Format) -> Tensor | None:
    if scale is None:
        return None
    _check_shape("the scale", scale, _scale_shape(weight, format))
    return _contiguous(scale)


def _scale_shape(weight: Tensor, format: Format) -> tuple[int, ...]:
    return (*weight.shape[:-1], format.groups(weight.shape[-1]))


def _check_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    if tensor.dtype != torch.uint8 or tuple(tensor.shape) != tuple(shape):
        raise FormatError(f"{name} is {tensor.dtype} {list(tensor.shape)}: expected torch.uint8 {list(shape)}")


def _rows(tensor: Tensor) -> int:
    return math.prod(tensor.shape[:-1])


def _data(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's bytes lie and how many they are."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _optional(tensor: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if tensor is None else _data(tensor)


@functools.cache
def c_format(format: Format) -> _CFormat:
    return _CFormat(sefp.SCHEMES.index(format.scheme), format.group_size)


def c_planes(planes: Planes) -> _CPlanes:
    bits = [_data(plane) for plane in planes.bits]
    return _CPlanes(
        *_data(planes.base),
        (ctypes.c_void_p * _BIT_PLANES)(*(address for address, _ in bits)),
        (ctypes.c_int64 * _BIT_PLANES)(*(size for _, size in bits)),
        len(bits),
        *_data(planes.scale),
    )


def _c_weight(weight: Tensor, format: Format) -> tuple[Any, ...]:
    """What every function takes that reads weights."""
    return ctypes.byref(c_format(format)), _rows(weight), weight.shape[-1], *_data(weight), _dtype(weight.dtype)


def _c_packed(planes: Planes, rows: int, columns: int, precision: Precision, format: Format) -> tuple[Any, ...]:
    """What every function takes that reads planes."""
    return ctypes.byref(c_format(format)), rows, columns, ctypes.byref(c_planes(planes)), precision.mantissa


def _c_tiers(tiers: Tiers) -> _CTiers:
    return _CTiers(
        (ctypes.c_void_p * len(Precision))(*(tier.data_ptr() for _, tier in tiers)),
        (ctypes.c_int64 * len(Precision))(*(_data(tier)[1] for _, tier in tiers)),
        (ctypes.c_int32 * len(Precision))(*(width.mantissa for width, _ in tiers)),
        len(tiers),
    )


def _c_codes(codes: Codes) -> _CCodes:
    return _CCodes(*_data(codes.code), *_data(codes.scale))
