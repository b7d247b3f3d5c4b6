"""A whole step, all layers and the head, as one launch, where a model's shape allows it: `otaro/ops/cuda/step.cu`.

Of launches one by one each begins with empty hands: weights come only once it has started. In one launch they come all
the time. Models with experts, layers at different widths, a cache of codes and heads of odd sizes go launch by launch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from otaro.engine.cuda.launches import has_kernels
from otaro.engine.cuda.matrices import PackedMatrix
from otaro.engine.cuda.model import DeviceModel, Layer
from otaro.engine.cuda.rows import CacheLayout, Rows
from otaro.ops import cuda
from otaro.ops.cuda import calls, compiler, step
from otaro.ops.cuda.calls import MOST_BATCH
from otaro.packing import BASE
from otaro.precision import NARROWEST

WHOLE_VARIABLE = "OTARO_WHOLE"
"""Set to 0, steps are made launch by launch."""


def whole_step(model: DeviceModel, widths: bytes, layout: CacheLayout) -> Whole | None:
    """What runs steps at these widths in one launch, or None where only several can."""
    if os.environ.get(WHOLE_VARIABLE) == "0" or not has_kernels(model.device) or layout.precision is not None:
        return None
    shape, dimension = model.shape, model.shape.head_dimension
    if model.dtype not in (torch.float16, torch.bfloat16) or len(set(widths[1:-1])) != 1:
        return None
    if dimension & (dimension - 1) or not 8 <= dimension <= step.MOST_DIMENSION:
        return None
    if shape.hidden % 4 or shape.intermediate % 8:
        return None
    matrices = [_matrices(layer) for layer in model.layers]
    if not matrices or any(found is None for found in matrices) or not isinstance(model.head, PackedMatrix):
        return None
    most = max(widths[1], widths[-1]) - NARROWEST.mantissa
    if step.slots(most, MOST_BATCH, dimension, cuda.device_limits(model.device.index or 0)) == 0:
        return None
    return Whole(model, widths, [found for found in matrices if found is not None], model.head)


def _matrices(layer: Layer) -> list[PackedMatrix] | None:
    if not isinstance(layer.feed_forward, tuple):
        return None
    found = [layer.qkv, layer.output, *layer.feed_forward]
    packed = [matrix for matrix in found if isinstance(matrix, PackedMatrix)]
    return packed if len(packed) == len(found) else None


class Whole:
    """Where a model's weights lie, as the kernel reads it."""

    def __init__(
        self, model: DeviceModel, widths: bytes, matrices: Sequence[list[PackedMatrix]], head: PackedMatrix
    ) -> None:
        self._model, self._head = model, head
        self._index = model.device.index or 0
        self._extra, self._head_extra = (width - NARROWEST.mantissa for width in (widths[1], widths[-1]))
        self._first = matrices[0]
        self._head_width = widths[-1]
        planes = [calls.c_planes(matrix.fragments(widths[1]), self._extra) for layer in matrices for matrix in layer]
        table = b"".join(bytes(entry) for entry in planes)
        device, layers = model.device, model.layers
        self._table = torch.frombuffer(bytearray(table), dtype=torch.uint8).to(device)
        self._norms = torch.stack([torch.stack((layer.attention_norm, layer.feed_forward_norm)) for layer in layers])
        self._query_norms = _stacked([layer.query_norm for layer in layers])
        self._key_norms = _stacked([layer.key_norm for layer in layers])
        self._windows = torch.tensor([layer.window for layer in layers], dtype=torch.int32).to(device)
        self._biases = [_stacked([layer[number].bias for layer in matrices]) for number in range(step.MATRICES)]
        self._counters = torch.zeros(step.counters(model.shape.kv_heads), dtype=torch.int32, device=device)

    def logits(self, x: Tensor, rows: Rows, head_rows: int) -> Tensor:
        """The first logits of each row, from the embeddings of their tokens, which are used up."""
        model, shape = self._model, self._model.shape
        count, dimension = x.shape[0], shape.head_dimension
        split = rows.stretches if rows.stretches > 1 else 0

        def floats(*size: int) -> Tensor:
            return torch.empty(size, dtype=torch.float32, device=x.device)

        qkv = floats(count, self._first[0].rows)
        partial = floats(count, shape.heads, split, dimension)
        extremes = floats(count, shape.heads, split, 2)
        mixed = torch.empty((count, shape.heads * dimension), dtype=model.dtype, device=x.device)
        between = torch.empty((count, shape.intermediate), dtype=model.dtype, device=x.device)
        logits = torch.empty((count, head_rows), dtype=torch.float16, device=x.device)
        head = calls.c_planes(self._head.fragments(self._head_width), self._head_extra)
        head.rows = head_rows
        most = max(self._extra, self._head_extra)
        slots = step.slots(most, count, dimension, cuda.device_limits(self._index))
        call = step.CStep(
            self._table.data_ptr(),
            head,
            (ctypes.c_void_p * step.MATRICES)(*map(_address, self._biases)),
            *map(_address, (self._norms, model.final_norm, self._query_norms, self._key_norms, model.frequency)),
            *map(_address, (self._windows, rows.positions, rows.places[0], rows.places[1])),
            *map(_address, (x, qkv, partial, extremes, mixed, between, logits, self._counters)),
            (step.CSize * step.MATRICES)(*map(_size, self._first)),
            *(shape.layers, count, int(model.dtype == torch.bfloat16), shape.hidden, shape.intermediate, shape.heads),
            *(shape.kv_heads, dimension, *self._first[0].starts[1:], rows.stretches, slots),
            *(shape.norm_epsilon, shape.rope_factor),
        )
        kernel = compiler.kernel(
            "step",
            self._index,
            OTARO_EXTRA=self._extra,
            OTARO_HEAD_EXTRA=self._head_extra,
            OTARO_COLUMNS=calls.kernel_columns(count),
        )
        blocks = cuda.device_limits(self._index).processors
        kernel.launch(
            call, blocks, step.threads(count), step.shared_bytes(slots, most, count, dimension), together=True
        )
        return logits


def _stacked(vectors: Sequence[Tensor | None]) -> Tensor | None:
    there = [vector for vector in vectors if vector is not None]
    return torch.stack(there).contiguous() if there else None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def _size(matrix: PackedMatrix) -> step.CSize:
    return step.CSize(matrix.rows, matrix.columns, matrix.plane_shape(BASE)[1])
