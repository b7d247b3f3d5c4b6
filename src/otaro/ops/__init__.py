"""The operations on SEFP weights: one schema each, served by the backend that suits the device.

    pack        weight → planes                          dequantize   planes → values at a width
    quantize    weight → values at a width (training)    linear       x · weightᵀ + bias from planes
    embedding   rows of packed weights

Backends are modules with these functions: `reference` (plain torch, any device), `cpu` (the native core), `gpu`
(Triton; quantize only) and `cuda` (NVIDIA GPUs; dequantize, linear and embedding, from planes in fragment order, which
:func:`arrange` makes). The environment variable ``OTARO_BACKEND`` chooses: ``auto`` (the default) takes the fastest
that is at hand and says once if that is not the native one on a CPU; ``native`` and ``reference`` insist. The four ops
that stand in a model's graph are registered with torch under ``otaro::``, so that ``torch.compile`` keeps them whole;
outside of it the backend is called at once, because torch's dispatch costs more than a small layer.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from otaro import sefp
from otaro.errors import OtaroError
from otaro.ops import cpu, cuda, reference
from otaro.ops.cuda import Fragments
from otaro.packing import Planes
from otaro.precision import WIDEST, Precision
from otaro.sefp import Format, Scheme, Tiers

OPS = ("pack", "dequantize", "quantize", "linear", "embedding")
# Above this many rows of x, dequantising the weight once and calling the library's matrix product is faster.
SMALL_BATCH = 32


@functools.cache
def _cpu_backend(choice: str) -> tuple[ModuleType, str]:
    """The module that serves CPU tensors, and why."""
    if choice not in ("auto", "native", "reference"):
        raise OtaroError(f"OTARO_BACKEND is {choice!r}: set it to auto, native or reference")
    if choice == "reference":
        return reference, "OTARO_BACKEND=reference"
    reason = cpu.available()
    if reason is None:
        return cpu, f"native core, {cpu.isa()}"
    if choice == "native":
        raise OtaroError(f"OTARO_BACKEND=native, but the native core is not available: {reason}")
    warnings.warn(f"otaro: the native core is not available ({reason}); using plain torch, slowly", stacklevel=3)
    return reference, f"native core not available: {reason}"


@functools.cache
def _gpu_backend(choice: str) -> tuple[ModuleType, str]:
    """The module that quantises on a GPU, and why."""
    if choice == "reference":
        return reference, "OTARO_BACKEND=reference"
    if importlib.util.find_spec("triton") is None:
        return reference, "Triton is not installed"
    return importlib.import_module("otaro.ops.gpu"), "Triton"


def _backend(device: torch.device) -> ModuleType:
    if device.type != "cpu":
        return reference
    return _cpu_backend(os.environ.get("OTARO_BACKEND", "auto"))[0]


def arranges(device: torch.device, format: Format) -> bool:
    """Whether weights of a format are to lie in fragment order on a device."""
    return _arranges(device, format, os.environ.get("OTARO_BACKEND", "auto"))


@functools.cache
def _arranges(device: torch.device, format: Format, choice: str) -> bool:
    return choice != "reference" and cuda.supports(format) and cuda.available(device) is None


def quantize_backend(device: torch.device) -> ModuleType:
    """The module that quantises weights on a device."""
    if device.type == "cuda":
        return _gpu_backend(os.environ.get("OTARO_BACKEND", "auto"))[0]
    return _backend(device)


def codec(device: torch.device) -> tuple[ModuleType, ModuleType]:
    """The modules that quantise with any number of tiers and that encode on a device."""
    native = _backend(device) is cpu
    return (cpu, cpu) if native else (reference, sefp)


def backends() -> list[tuple[str, str, str]]:
    """For each op and kind of device: (op, backend, why)."""
    module, reason = _cpu_backend(os.environ.get("OTARO_BACKEND", "auto"))
    name = "native" if module is cpu else "reference"
    rows = [(f"{op} (cpu)", name, reason) for op in OPS]
    if module is cpu:
        small = f"{reason}; float32 and at most {SMALL_BATCH} rows, else dequantize and torch's matrix product"
        rows[OPS.index("linear")] = ("linear (cpu)", name, small)
    if torch.cuda.is_available():
        reason = "OTARO_BACKEND=reference"
        if os.environ.get("OTARO_BACKEND", "auto") != "reference":
            reason = cuda.available(torch.device("cuda")) or ""
        for op in OPS:
            kernel = not reason and op in ("dequantize", "linear", "embedding")
            served = (
                ("cuda", "scheme nested, groups of 64 and more") if kernel else ("reference", reason or "plain torch")
            )
            rows.append((f"{op} (cuda)", *served))
        gpu_module, gpu_reason = _gpu_backend(os.environ.get("OTARO_BACKEND", "auto"))
        gpu_name = "reference" if gpu_module is reference else "triton"
        rows[len(OPS) + OPS.index("quantize")] = ("quantize (cuda)", gpu_name, gpu_reason)
    return rows


def scales(weight: Tensor, format: Format = Format()) -> Tensor:
    """The scale of every group of a weight, [..., groups]: found once, it serves every width."""
    found: Tensor = _backend(weight.device).scales(weight.detach(), format)
    return found


def pack(weight: Tensor, format: Format = Format(), scale: Tensor | None = None) -> tuple[Planes, Tensor]:
    """The planes of a weight up to E5M8, and how many groups had their exponent clamped from [below, above]."""
    planes, clamped = _backend(weight.device).pack(weight.detach(), format, scale)
    return planes, clamped


def quantize(tensor: Tensor, precision: Precision | str, *, scheme: Scheme = "nested", group_size: int = 64) -> Tensor:
    """The values a weight takes at a width: same shape, same dtype, gradients pass straight through.

    Groups run along the last dimension. Raises :class:`otaro.errors.WeightError` for NaN or infinity. For ``nearest``
    each width is rounded from the tensor itself; a packed model slices it from E5M8 (see :func:`fake_quantize`).
    """
    format, precision = Format(scheme, group_size), Precision(precision)
    sefp.check_weight(tensor)
    return _quantize(tensor, precision, format)


def fake_quantize(
    weight: Tensor, precision: Precision, format: Format, tiers: Tiers = (), scale: Tensor | None = None
) -> Tensor:
    """The values the *packed* weight has at a width, gradients passing straight through.

    With `tiers` they go to the tensor that decides that width's last bit. `scale` need not be found again.
    """
    if format.scheme == "nearest" and precision < WIDEST:
        _, encoder = codec(weight.device)
        codes = encoder.truncate(encoder.encode(weight.detach(), WIDEST, format), precision)
        return straight_through(weight, encoder.decode(codes, weight.dtype))
    return _quantize(weight, precision, format, tiers, scale)


def deciding(weight: Tensor, precision: Precision, tiers: Tiers) -> Tensor:
    """The weight or the tier that decides the last bit of a width."""
    return next((tier for width, tier in tiers if width >= precision), weight)


def straight_through(weight: Tensor, values: Tensor) -> Tensor:
    """`values` in the place of `weight`, their gradient going to the weight; nothing is saved for it."""
    result: Tensor = _StraightThrough.apply(weight, values)  # type: ignore[no-untyped-call]
    return result


def dequantize(
    planes: Planes | Fragments, columns: int, precision: Precision, format: Format, dtype: torch.dtype
) -> Tensor:
    """The values of packed weights at a width."""
    values: Tensor
    if isinstance(planes, Fragments):
        return cuda.dequantize(planes, precision, dtype)
    if torch.compiler.is_compiling():
        values = torch.ops.otaro.dequantize(*_arguments(planes, columns, precision, format), dtype)
    else:
        values = _backend(planes.base.device).dequantize(planes, columns, precision, format, dtype)
    return values


def linear(
    x: Tensor, planes: Planes | Fragments, columns: int, precision: Precision, format: Format, bias: Tensor | None
) -> Tensor:
    """``x @ weight.T + bias`` with the weight at a width; differentiable in x and bias."""
    result: Tensor
    if isinstance(planes, Fragments):
        return cuda.linear(x, planes, precision, bias)
    small = x.numel() <= SMALL_BATCH * columns and x.dtype == torch.float32 and x.device.type == "cpu"
    differentiated = x.requires_grad or (bias is not None and bias.requires_grad)
    if small and not (differentiated and torch.is_grad_enabled()):
        if torch.compiler.is_compiling():
            result = torch.ops.otaro.linear(x, *_arguments(planes, columns, precision, format), bias)
        else:
            result = _backend(x.device).linear(x, planes, columns, precision, format, bias)
        return result
    return torch.nn.functional.linear(x, dequantize(planes, columns, precision, format, x.dtype), bias)


def embedding(
    ids: Tensor, planes: Planes | Fragments, columns: int, precision: Precision, format: Format, dtype: torch.dtype
) -> Tensor:
    """Rows of a packed matrix, shaped [*ids.shape, columns]."""
    values: Tensor
    if isinstance(planes, Fragments):
        return cuda.embedding(ids, planes, precision, dtype)
    if torch.compiler.is_compiling():
        values = torch.ops.otaro.embedding(ids, *_arguments(planes, columns, precision, format), dtype)
    else:
        values = _backend(ids.device).embedding(ids, planes, columns, precision, format, dtype)
    return values


def _arguments(planes: Planes, columns: int, precision: Precision, format: Format) -> tuple[object, ...]:
    """Packed weights as ops registered with torch take them."""
    needed = planes.up_to(format.stored(precision))
    width, scheme, size = precision.mantissa, format.scheme, format.group_size
    return needed.base, list(needed.bits), needed.scale, columns, width, scheme, size


def _packed(
    base: Tensor, bits: list[Tensor], scale: Tensor, columns: int, mantissa: int, scheme: Scheme, group_size: int
) -> tuple[Planes, int, Precision, Format]:
    """The other way round."""
    return Planes(base, tuple(bits), scale), columns, Precision.from_mantissa(mantissa), Format(scheme, group_size)


def _quantize(
    weight: Tensor, precision: Precision, format: Format, tiers: Tiers = (), scale: Tensor | None = None
) -> Tensor:
    given = [(width, tier.detach()) for width, tier in tiers]
    if torch.compiler.is_compiling():
        values = torch.ops.otaro.quantize(
            *(weight.detach(), precision.mantissa, format.scheme, format.group_size),
            *([tier for _, tier in given], [width.mantissa for width, _ in given], scale),
        )
    else:
        values = quantize_backend(weight.device).quantize(weight.detach(), precision, format, given, scale)
    return straight_through(deciding(weight, precision, tiers), values)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, weight: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


_PACKED = "Tensor base, Tensor[] bits, Tensor scale, int columns, int mantissa, str scheme, int group_size"
_custom_op = functools.partial(torch.library.custom_op, mutates_args=())


@_custom_op(
    "otaro::quantize",
    schema="(Tensor weight, int mantissa, str scheme, int group_size, Tensor[] tiers, int[] widths, Tensor? scale)"
    " -> Tensor",
)
def _quantize_op(
    weight: Tensor,
    mantissa: int,
    scheme: Scheme,
    group_size: int,
    tiers: list[Tensor],
    widths: list[int],
    scale: Tensor | None,
) -> Tensor:
    listed = list(zip(map(Precision.from_mantissa, widths), tiers, strict=True))
    precision, format = Precision.from_mantissa(mantissa), Format(scheme, group_size)
    values: Tensor = quantize_backend(weight.device).quantize(weight, precision, format, listed, scale)
    return values


@_quantize_op.register_fake
def _(weight: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


@_custom_op("otaro::dequantize", schema=f"({_PACKED}, ScalarType dtype) -> Tensor")
def _dequantize_op(base: Tensor, *rest: Any) -> Tensor:
    *packed, dtype = rest
    values: Tensor = _backend(base.device).dequantize(*_packed(base, *packed), dtype)
    return values


@_dequantize_op.register_fake
def _(base: Tensor, bits: list[Tensor], scale: Tensor, columns: int, *rest: Any) -> Tensor:
    return base.new_empty((*base.shape[:-1], columns), dtype=rest[-1])


@_custom_op("otaro::linear", schema=f"(Tensor x, {_PACKED}, Tensor? bias) -> Tensor")
def _linear_op(x: Tensor, *rest: Any) -> Tensor:
    *packed, bias = rest
    result: Tensor = _backend(x.device).linear(x, *_packed(*packed), bias)
    return result


@_linear_op.register_fake
def _(x: Tensor, base: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], base.shape[0]))


@_custom_op("otaro::embedding", schema=f"(Tensor ids, {_PACKED}, ScalarType dtype) -> Tensor")
def _embedding_op(ids: Tensor, *rest: Any) -> Tensor:
    *packed, dtype = rest
    values: Tensor = _backend(ids.device).embedding(ids, *_packed(*packed), dtype)
    return values


@_embedding_op.register_fake
def _(ids: Tensor, base: Tensor, bits: list[Tensor], scale: Tensor, columns: int, *rest: Any) -> Tensor:
    return base.new_empty((*ids.shape, columns), dtype=rest[-1])
