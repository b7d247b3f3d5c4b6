"""The CUDA kernels where they run: `pytest -m gpu tests/test_cuda_gpu.py` on a machine with an NVIDIA GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import otaro
from otaro import nn as sefp_nn
from otaro.ops import cuda, reference
from otaro.ops.cuda import compiler
from otaro.ops.cuda.layout import Fragments, from_planes, to_planes
from otaro.packing import Planes
from otaro.precision import WIDEST, Precision
from otaro.sefp import Format


def missing() -> str | None:
    if not torch.cuda.is_available():
        return "no GPU"
    return compiler.available(torch.device("cuda", 0))


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

FORMAT = Format()
# Relative to the largest result: half a unit of the result's type in the last place, and as much again for the sums.
BUDGET = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


def packed(*shape: int, format: Format = FORMAT, seed: int = 0) -> tuple[Planes, Fragments]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    weight = torch.randn(shape, generator=generator, device="cuda") * 0.02
    planes, _ = reference.pack(weight, format)
    return planes, from_planes(planes, shape, format)


def activations(batch: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(1)
    return torch.randn(batch, columns, generator=generator, device="cuda").to(dtype)


def poison(*shape: int, dtype: torch.dtype) -> None:
    """NaN where the allocator will put the next tensor of that size."""
    torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def assert_product(x: Tensor, planes: Planes, fragments: Fragments, precision: Precision, bias: Tensor | None) -> None:
    poison(x.shape[0], fragments.rows, dtype=x.dtype)
    result = cuda.linear(x, fragments, precision, bias)
    weight = reference.dequantize(planes, x.shape[1], precision, Format("nested", fragments.group_size), torch.float64)
    wanted = x.double() @ weight.T + (0 if bias is None else bias.double())
    error = float((result.double() - wanted).abs().max() / wanted.abs().max())
    assert error < BUDGET[x.dtype]


@pytest.mark.parametrize("precision", list(Precision), ids=str)
@pytest.mark.parametrize("batch", [1, 2, 8, 9, 16])
@pytest.mark.parametrize("rows, columns", [(1, 1), (37, 257), (576, 576), (1000, 1022), (4096, 4096), (530, 14336)])
def test_products_agree_with_the_codec(rows: int, columns: int, batch: int, precision: Precision) -> None:
    planes, fragments = packed(rows, columns)
    for dtype in (torch.float16, torch.bfloat16):
        bias = torch.randn(rows, device="cuda").to(dtype) if dtype == torch.bfloat16 else None
        assert_product(activations(batch, columns, dtype), planes, fragments, precision, bias)


@pytest.mark.parametrize("group_size", [128, 256])
def test_larger_groups(group_size: int) -> None:
    planes, fragments = packed(100, 700, format=Format("nested", group_size))
    assert_product(activations(3, 700, torch.float16), planes, fragments, Precision.E5M4, None)


@pytest.mark.parametrize("precision", list(Precision), ids=str)
def test_products_with_unit_vectors_are_the_decoded_weights_bit_for_bit(precision: Precision) -> None:
    planes, fragments = packed(64, 512)
    for dtype in (torch.float16, torch.bfloat16):
        unit = torch.eye(512, dtype=dtype, device="cuda")
        result = torch.cat([cuda.linear(rows, fragments, precision, None) for rows in unit.split(16)])
        assert torch.equal(result.T, reference.dequantize(planes, 512, precision, FORMAT, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 3), (333, 130), (4096, 4096), (2, 20, 68)])
def test_values_and_rows_are_the_codecs_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    planes, fragments = packed(*shape)
    ids = torch.randint(0, fragments.rows, (3, 5), device="cuda")
    for precision in Precision:
        values = reference.dequantize(planes, shape[-1], precision, FORMAT, dtype)
        poison(*shape, dtype=dtype)
        assert torch.equal(cuda.dequantize(fragments, precision, dtype), values)
        assert torch.equal(cuda.embedding(ids, fragments, precision, dtype), values.view(-1, shape[-1])[ids])


def test_fragment_order_has_an_exact_inverse() -> None:
    planes, fragments = packed(1000, 4160)
    for name, plane in to_planes(fragments, FORMAT).named().items():
        assert torch.equal(plane, planes.named()[name])


def test_equal_calls_give_equal_bits_on_several_streams() -> None:
    _, fragments = packed(4096, 4096)
    x = activations(4, 4096, torch.bfloat16)
    alone = {precision: cuda.linear(x, fragments, precision, None) for precision in Precision}
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for repeat in range(24):
        precision = list(Precision)[repeat % 6]
        with torch.cuda.stream(streams[repeat % 4]):
            results.append((precision, cuda.linear(x, fragments, precision, None)))
    torch.cuda.synchronize()
    for precision, result in results:
        assert torch.equal(result, alone[precision])


@pytest.mark.parametrize("batch", [1, 8, 16])
def test_one_captured_graph_serves_every_width(batch: int) -> None:
    _, fragments = packed(2048, 4096)
    x = activations(batch, 4096, torch.float16)
    width = torch.full((1,), 8, dtype=torch.int32, device="cuda")
    cuda.linear(x, fragments, WIDEST, None, width)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = cuda.linear(x, fragments, WIDEST, None, width)
    for precision in Precision:
        result.fill_(torch.nan)
        width.fill_(precision.mantissa)
        graph.replay()
        assert torch.equal(result, cuda.linear(x, fragments, precision, None))


def test_layers_in_a_compiled_graph() -> None:
    planes, _ = packed(300, 512)
    layer = sefp_nn.SefpLinear((300, 512), FORMAT, WIDEST, dtype=torch.bfloat16, device="cuda")
    layer.load(planes)
    layer.precision = Precision.E5M4
    x = activations(1, 512, torch.bfloat16)
    eager = layer(x)
    assert layer.arranged
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), eager)


def test_a_packed_model_gives_the_logits_of_plain_torch(packed_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(24, device="cuda")[None]
    logits = {}
    for backend in ("auto", "reference"):
        monkeypatch.setenv("OTARO_BACKEND", backend)
        model = otaro.load(packed_llama, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            for precision in ("E5M8", "E5M3"):
                model.set_precision(precision)
                logits[backend, precision] = [model(ids).logits, model(ids[:, :3]).logits]
    for precision in ("E5M8", "E5M3"):
        for ours, plain in zip(logits["auto", precision], logits["reference", precision], strict=True):
            torch.testing.assert_close(ours, plain, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("rows, columns, batch", [(1536, 576, 1), (1536, 576, 8), (20, 4500, 5), (14336, 4096, 16)])
def test_gated_products(rows: int, columns: int, batch: int) -> None:
    tiles = -(-rows // 8)
    planes, fragments = packed(16 * tiles, columns)
    for precision in (Precision.E5M3, Precision.E5M4, Precision.E5M8):
        bits = fragments.bits[: precision.mantissa - 3]
        used = Fragments(fragments.base, bits, fragments.scale, fragments.shape, fragments.group_size)
        weight = reference.dequantize(planes, columns, precision, FORMAT, torch.float64)
        for dtype in (torch.float16, torch.bfloat16):
            x = activations(batch, columns, dtype)
            both = (x.double() @ weight.T).unflatten(1, (tiles, 2, 8))
            wanted = (torch.nn.functional.silu(both[:, :, 0]) * both[:, :, 1]).flatten(1)[:, :rows]
            for overlap in (False, True):
                torch.cuda.synchronize()
                poison(batch, rows, dtype=dtype)
                result = cuda.multiply(x, used, precision, None, overlap, gated=rows)
                assert result is not None
                error = float((result.double() - wanted).abs().max() / wanted.abs().max())
                assert error < 2 * BUDGET[dtype]
