"""Models of given shapes with random weights, packed or in FP16, for the engine's own code to run."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from otaro.engine.cuda.matrices import Arena, DenseMatrix, PackedMatrix, Product, arena_bytes
from otaro.engine.cuda.model import DeviceModel, Layer
from otaro.engine.shape import Shape
from otaro.ops.cuda import calls, compiler
from otaro.ops.cuda.layout import ROWS
from otaro.packing import BITS, SCALE, WIDTHS
from otaro.precision import EMBEDDING_FLOOR, NARROWEST, Precision
from otaro.sefp import Format


def _shape(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, dimension: int, vocabulary: int) -> Shape:
    frequency = tuple(5e5 ** (-2 * i / dimension) for i in range(dimension // 2))
    return Shape(layers, hidden, inner, heads, kv_heads, dimension, vocabulary, 1e-5, frequency, 1.0, (0,) * layers)


SHAPES = {
    "llama-3-8b": _shape(32, 4096, 14336, 32, 8, 128, 128256),
    "smollm2-135m": _shape(30, 576, 1536, 9, 3, 64, 49152),
    "tiny": _shape(2, 64, 96, 4, 2, 16, 300),
}
TIED = ("smollm2-135m",)
Make = Callable[[int, int, tuple[int, ...]], Product]
"""A matrix of so many rows and columns, whose parts begin at these rows."""


def model(name: str, make: Make, dtype: torch.dtype, device: torch.device, layers: int | None = None) -> DeviceModel:
    shape = SHAPES[name]
    if layers is not None:
        shape = replace(shape, layers=layers, window=(0,) * layers)
    query, key = shape.heads * shape.head_dimension, shape.kv_heads * shape.head_dimension
    inner = -(-shape.intermediate // ROWS) * ROWS
    norm = torch.ones(shape.hidden, device=device)

    def layer() -> Layer:
        return Layer(
            make(query + 2 * key, shape.hidden, (0, query, query + key)),
            make(shape.hidden, query, (0,)),
            (make(inner + shape.intermediate, shape.hidden, (0, inner)), make(shape.hidden, shape.intermediate, (0,))),
            norm,
            norm,
        )

    made = [layer() for _ in range(shape.layers)]
    embedding = make(shape.vocabulary, shape.hidden, (0,))
    head = embedding if name in TIED else make(shape.vocabulary, shape.hidden, (0,))
    return DeviceModel(shape, made, embedding, head, norm, dtype, {})


def dense(dtype: torch.dtype, device: torch.device) -> Make:
    def make(rows: int, columns: int, starts: tuple[int, ...]) -> DenseMatrix:
        weight = torch.empty((rows, columns), dtype=dtype, device=device).normal_(0, 0.02)
        return DenseMatrix(weight, starts)

    return make


def packed_model(name: str, dtype: torch.dtype, device: torch.device, layers: int | None = None) -> DeviceModel:
    """Random planes. Those that come with a width's file share one piece of memory, as the engine's do."""

    def make(rows: int, columns: int, starts: tuple[int, ...]) -> PackedMatrix:
        ends = (*starts[1:], rows)
        shapes = [(end - start, columns) for start, end in zip(starts, ends, strict=True)]
        gates = len(shapes) == 2
        return PackedMatrix([shapes[1]] * 2 if gates else shapes, Format(), device, gates=gates)

    made = model(name, make, dtype, device, layers)
    together: dict[Precision, list[tuple[PackedMatrix, str]]] = {width: [] for width in Precision}
    for role, matrix in matrices(made):
        assert isinstance(matrix, PackedMatrix)
        for plane, width in WIDTHS.items():
            always = role != "layer" and width <= EMBEDDING_FLOOR
            together[NARROWEST if always else width].append((matrix, plane))
    for planes in together.values():
        arena = Arena(sum(arena_bytes(math.prod(matrix.plane_shape(plane))) for matrix, plane in planes), device)
        for matrix, plane in planes:
            low, high = (20, 30) if plane == SCALE else (0, 256)  # scales of about 2^-9
            matrix.set_plane(plane, arena.take(matrix.plane_shape(plane)).random_(low, high))
    return made


def matrices(model: DeviceModel) -> list[tuple[str, Product]]:
    """All of them once, with what they are."""
    found: list[tuple[str, Product]] = [("embedding", model.embedding)]
    if model.head is not model.embedding:
        found.append(("head", model.head))
    for layer in model.layers:
        assert isinstance(layer.feed_forward, tuple)
        found += [("layer", matrix) for matrix in (layer.qkv, layer.output, *layer.feed_forward)]
    return found


def drop_to(model: DeviceModel, precision: Precision) -> None:
    """Free the planes above a width, as `Engine.drop_to` does."""
    for role, matrix in matrices(model):
        kept = max(precision, EMBEDDING_FLOOR) if role != "layer" else precision
        for bit in range(kept.mantissa + 1, 9):
            if isinstance(matrix, PackedMatrix):
                matrix.drop(BITS[bit])
    model.dropped(precision)


def read_bytes(model: DeviceModel, widths: bytes) -> int:
    """Bytes of weights that one token reads."""
    size = 0
    for role, matrix in matrices(model):
        if role == "embedding" and model.head is not model.embedding:
            continue
        width = widths[1] if role == "layer" else widths[-1]
        size += matrix.nbytes if isinstance(matrix, DenseMatrix) else _planes_bytes(matrix, width)
    return size


def _planes_bytes(matrix: Product, width: int) -> int:
    assert isinstance(matrix, PackedMatrix)
    planes = matrix.fragments(width)
    return planes.base.nbytes + planes.scale.nbytes + sum(plane.nbytes for plane in planes.bits)


def widths_of(model: DeviceModel, precision: Precision) -> bytes:
    outer = max(precision, EMBEDDING_FLOOR).mantissa
    return bytes([outer, *[precision.mantissa] * model.shape.layers, outer])


def compile_kernels(index: int) -> None:
    """All products, by as many threads as there are processors, before the first is needed."""
    major, minor = torch.cuda.get_device_capability(index)
    jobs: list[tuple[str, tuple[tuple[str, int], ...]]] = [("decode", ())]
    for extra, columns, gated in itertools.product(range(6), (1, 8, 16), (0, 1)):
        threads = 32 * calls.most_warps(columns)
        definitions = (
            *(("OTARO_COLUMNS", columns), ("OTARO_EXTRA", extra)),
            *(("OTARO_GATED", gated), ("OTARO_THREADS", threads)),
        )
        jobs.append(("matvec", definitions))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: compiler.compiled(job[0], f"sm_{major}{minor}", job[1]), jobs))
