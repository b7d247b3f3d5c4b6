"""The CUDA kernels against the codec, on a CPU: the very source, its threads emulated and its accesses checked."""

from __future__ import annotations

import copy
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from otaro import nn as sefp_nn
from otaro import ops
from otaro.errors import PrecisionError
from otaro.ops import cuda, reference
from otaro.ops.cuda import calls, compiler
from otaro.ops.cuda.layout import Fragments, from_planes, to_planes
from otaro.packing import Planes
from otaro.precision import WIDEST, Precision
from otaro.sefp import Format
from tests.cuda_emulation import LIMITS, EmulatedKernel, bits_of, build, install

WIDTHS = list(Precision)
FORMAT = Format()
# Relative to the largest result: half a unit of the result's type in the last place, and as much again for the sums.
BUDGET = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("emulation"))


@pytest.fixture
def emulated(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(library, monkeypatch)
    yield
    monkeypatch.undo()
    for cache in (cuda._launch_plan, cuda._has_plan, ops._arranges):
        cache.cache_clear()


def packed(*shape: int, format: Format = FORMAT, seed: int = 0) -> tuple[Planes, Fragments]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * torch.randn((*shape[:-1], 1), generator=generator).exp() * 0.05
    weight[..., : min(shape[-1], 64)] *= (torch.rand(shape[:-1], generator=generator) > 0.2)[..., None]
    planes, _ = reference.pack(weight, format)
    return planes, from_planes(planes, shape, format)


def expected(x: Tensor, planes: Planes, precision: Precision, format: Format, bias: Tensor | None = None) -> Tensor:
    weight = reference.dequantize(planes, x.shape[-1], precision, format, torch.float64)
    result = x.double() @ weight.T
    return result if bias is None else result + bias.double()


def assert_close(result: Tensor, wanted: Tensor) -> None:
    assert bool(result.isfinite().all())
    error = (result.double() - wanted).abs().max() / wanted.abs().max()
    assert error < BUDGET[result.dtype], f"{float(error):.2e}"


@pytest.mark.parametrize("group_size", [64, 128, 256])
@pytest.mark.parametrize("shape", [(1, 1), (17, 64), (33, 257), (16, 256), (3, 20, 130)])
def test_fragment_order_has_an_exact_inverse(shape: tuple[int, ...], group_size: int) -> None:
    format = Format("nested", group_size)
    planes, fragments = packed(*shape, format=format)
    back = to_planes(fragments, format)
    for name, plane in planes.named().items():
        assert torch.equal(back.named()[name], plane), name


def test_fragment_order_holds_every_byte_of_the_planes() -> None:
    planes, fragments = packed(32, 512)
    held = (fragments.base, *fragments.bits, fragments.scale)
    for plane, laid in zip((planes.base, *planes.bits, planes.scale), held, strict=True):
        assert plane.numel() == laid.numel()
        assert int(torch.bincount(plane.flatten().int()).sum()) == laid.numel()


def test_structures_are_as_large_as_in_the_source(library: ctypes.CDLL) -> None:
    assert ctypes.sizeof(calls.CMatvec) == library.matvec_size()
    assert ctypes.sizeof(calls.CDecode) == library.decode_size()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("precision", WIDTHS, ids=str)
def test_products_with_unit_vectors_are_the_decoded_weights_bit_for_bit(precision: Precision) -> None:
    planes, fragments = packed(16, 256)
    for dtype in (torch.float16, torch.bfloat16):
        values = reference.dequantize(planes, 256, precision, FORMAT, dtype)
        unit = torch.eye(256, dtype=dtype)
        result = torch.cat([cuda.linear(rows, fragments, precision, None) for rows in unit.split(16)])
        # The sum of a zero with a sign and zeros has none.
        assert torch.equal(result.T, values)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("precision", WIDTHS, ids=str)
@pytest.mark.parametrize(
    "rows, columns, batch, dtype",
    [
        (1, 1, 1, torch.float16),
        (37, 257, 1, torch.bfloat16),
        (100, 770, 1, torch.float16),
        (33, 600, 5, torch.bfloat16),
        (80, 64, 8, torch.float16),
        (19, 1030, 16, torch.bfloat16),
    ],
)
def test_products_agree_with_the_codec(
    rows: int, columns: int, batch: int, dtype: torch.dtype, precision: Precision
) -> None:
    planes, fragments = packed(rows, columns, seed=rows)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, columns, generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype) if batch != 5 else None
    result = cuda.linear(x, fragments, precision, bias)
    assert_close(result, expected(x, planes, precision, FORMAT, bias))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("batch", [1, 9])
def test_every_division_of_the_work_gives_the_same_sums(
    split: int, tiles: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes, fragments = packed(110, 1100)
    x = torch.randn(batch, 1100, generator=torch.Generator().manual_seed(2)).half()
    launch_plan = cuda.launch_plan
    choices = {"split": split, "tiles": tiles, "blocks": 1}
    monkeypatch.setattr(cuda, "launch_plan", lambda *arguments: launch_plan(*arguments, **choices))
    results = []
    for seed in (0, 1):
        monkeypatch.setattr(EmulatedKernel, "seed", seed)
        results.append(cuda.linear(x, fragments, Precision.E5M6, None))
    assert_close(results[0], expected(x, planes, Precision.E5M6, FORMAT))
    for other in results[1:]:
        assert torch.equal(bits_of(other), bits_of(results[0]))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("group_size", [128, 256])
def test_larger_groups(group_size: int) -> None:
    format = Format("nested", group_size)
    planes, fragments = packed(40, 700, format=format)
    x = torch.randn(2, 700, generator=torch.Generator().manual_seed(3)).half()
    assert_close(cuda.linear(x, fragments, Precision.E5M4, None), expected(x, planes, Precision.E5M4, format))
    values = cuda.dequantize(fragments, Precision.E5M7, torch.float32)
    assert torch.equal(values, reference.dequantize(planes, 700, Precision.E5M7, format, torch.float32))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("batch", [1, 4, 12])
def test_a_width_on_the_device_gives_the_bits_of_the_width_itself(batch: int) -> None:
    _, fragments = packed(48, 520)
    x = torch.randn(batch, 520, generator=torch.Generator().manual_seed(4)).bfloat16()
    width = torch.zeros(1, dtype=torch.int32)
    for precision in WIDTHS:
        width.fill_(precision.mantissa)
        result = cuda.linear(x, fragments, WIDEST, None, width)
        assert torch.equal(bits_of(result), bits_of(cuda.linear(x, fragments, precision, None)))
    # Bits that are not here cannot be asked for from the device.
    width.fill_(8)
    narrow = Fragments(fragments.base, fragments.bits[:1], fragments.scale, fragments.shape, 64)
    result = cuda.linear(x, narrow, Precision.E5M4, None, width)
    assert torch.equal(bits_of(result), bits_of(cuda.linear(x, fragments, Precision.E5M4, None)))


@pytest.mark.usefixtures("emulated")
def test_bfloat16_activations_of_any_size_are_kept() -> None:
    planes, fragments = packed(16, 512)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(5))
    x = (x * torch.tensor([1e-30, 1.0, 1e30])[:, None]).bfloat16()
    result = cuda.linear(x, fragments, WIDEST, None)
    for row, wanted in zip(result, expected(x, planes, WIDEST, FORMAT), strict=True):
        assert_close(row, wanted)
    x[1, 5] = torch.nan
    assert bool(cuda.linear(x, fragments, WIDEST, None)[1].isnan().all())


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 3), (33, 130), (16, 256), (2, 20, 68)])
def test_values_are_the_codecs_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    planes, fragments = packed(*shape)
    rows, columns = fragments.rows, shape[-1]
    ids = torch.tensor([[rows - 1, 0], [rows // 2, 0]])
    for precision in WIDTHS:
        values = reference.dequantize(planes, columns, precision, FORMAT, dtype)
        result = cuda.dequantize(fragments, precision, dtype)
        assert result.shape == values.shape
        assert torch.equal(bits_of(result), bits_of(values))
        picked = cuda.embedding(ids, fragments, precision, dtype)
        assert torch.equal(bits_of(picked), bits_of(values.view(rows, columns)[ids]))
    outside = cuda.embedding(torch.tensor([-1, rows]), fragments, WIDEST, dtype)
    assert bool(outside.isnan().all())


@pytest.mark.usefixtures("emulated")
def test_large_batches_other_types_and_gradients_take_the_decoded_weight() -> None:
    planes, fragments = packed(24, 100)
    weight = reference.dequantize(planes, 100, Precision.E5M5, FORMAT, torch.float32)
    x = torch.randn(17, 100)
    assert torch.equal(cuda.linear(x, fragments, Precision.E5M5, None), x @ weight.T)
    half = torch.randn(2, 100).bfloat16().requires_grad_()
    cuda.linear(half, fragments, Precision.E5M5, None).sum().backward()
    assert half.grad is not None
    torch.testing.assert_close(half.grad[0], weight.bfloat16().sum(0))
    with pytest.raises(ValueError, match="width on the device"):
        cuda.linear(x, fragments, Precision.E5M5, None, torch.ones(1, dtype=torch.int32))


@pytest.mark.usefixtures("emulated")
def test_bits_that_are_not_here_are_refused() -> None:
    _, fragments = packed(16, 64)
    narrow = Fragments(fragments.base, fragments.bits[:1], fragments.scale, fragments.shape, 64)
    with pytest.raises(PrecisionError, match="only E5M4"):
        cuda.linear(torch.randn(1, 64).half(), narrow, Precision.E5M5, None)
    with pytest.raises(ValueError, match="columns"):
        cuda.linear(torch.randn(2, 32).half(), fragments, Precision.E5M3, None)


@pytest.mark.usefixtures("emulated")
def test_registered_ops_have_fakes_that_agree() -> None:
    _, fragments = packed(20, 70)
    held = (fragments.base, list(fragments.bits[:2]), fragments.scale, 20, 70, 64)
    checks = ("test_schema", "test_faketensor")
    x, ids = torch.randn(3, 70).half(), torch.tensor([1, 2])
    torch.library.opcheck(torch.ops.otaro.fragments_linear, (x, *held, None, None), test_utils=checks)
    torch.library.opcheck(torch.ops.otaro.fragments_rows, (*held, ids, torch.bfloat16), test_utils=checks)


@pytest.mark.usefixtures("emulated")
def test_layers_compute_from_fragments_and_are_saved_as_planes() -> None:
    planes, _ = packed(40, 130)
    layer = sefp_nn.SefpLinear((40, 130), FORMAT, Precision.E5M7, dtype=torch.float16)
    layer.load(planes.up_to(Precision.E5M7))
    layer.precision = Precision.E5M5
    x = torch.randn(2, 130, generator=torch.Generator().manual_seed(6)).half()
    assert_close(layer(x), expected(x, planes, Precision.E5M5, FORMAT))
    assert layer.arranged
    assert layer.stored == Precision.E5M7
    layer.attach(8, planes.bits[4])
    layer.precision = WIDEST
    assert_close(layer(x), expected(x, planes, WIDEST, FORMAT))

    saved = layer.state_dict()
    assert layer.arranged
    for name, plane in planes.named().items():
        assert torch.equal(saved[name], plane), name
    twin = copy.deepcopy(layer)
    twin.load_state_dict(saved)
    assert not twin.arranged
    assert torch.equal(twin(x), layer(x))
    layer.to(torch.bfloat16)
    assert not layer.arranged
    assert torch.equal(layer.planes.base, planes.base)
    assert layer.weight.dtype == torch.bfloat16


@pytest.mark.usefixtures("emulated")
def test_layers_are_whole_in_a_compiled_graph() -> None:
    planes, _ = packed(40, 130)
    layer = sefp_nn.SefpLinear((40, 130), FORMAT, WIDEST, dtype=torch.float16)
    layer.load(planes)
    layer.arrange()
    x = torch.randn(2, 130, generator=torch.Generator().manual_seed(8)).half()
    with torch.no_grad():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), layer(x))
        layer.precision = WIDEST
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.usefixtures("emulated")
def test_embeddings_tied_heads_and_experts_compute_from_fragments() -> None:
    planes, _ = packed(50, 96)
    table = sefp_nn.SefpEmbedding((50, 96), FORMAT, WIDEST, dtype=torch.bfloat16)
    table.load(planes)
    head = sefp_nn.SefpLinear((50, 96), FORMAT, WIDEST, tied_to=table, dtype=torch.bfloat16)
    table.precision, head.precision = Precision.E5M6, Precision.E5M4
    ids = torch.tensor([[3, 49], [0, 7]])
    values = reference.dequantize(planes, 96, Precision.E5M6, FORMAT, torch.bfloat16)
    assert torch.equal(table(ids), values[ids])
    x = torch.randn(1, 96, generator=torch.Generator().manual_seed(7)).bfloat16()
    assert_close(head(x), expected(x, planes, Precision.E5M4, FORMAT))

    stack, _ = packed(3, 20, 64)
    experts = sefp_nn.SefpWeight((3, 20, 64), FORMAT, WIDEST, transposed=True, dtype=torch.float16)
    experts.load(stack)
    experts.precision = Precision.E5M3
    values = reference.dequantize(stack, 64, Precision.E5M3, FORMAT, torch.float16)
    assert torch.equal(experts[1], values[1].T)
    assert torch.equal(experts.dequantize(), values.transpose(-1, -2))
    assert experts.arranged


@pytest.mark.usefixtures("emulated")
def test_the_emulation_finds_accesses_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fragments = packed(16, 64)
    x = torch.randn(1, 64).half()
    monkeypatch.setattr(calls.Plan, "shared_bytes", lambda plan, rows: 512)
    with pytest.raises(AssertionError, match="shared memory"):
        cuda.linear(x, fragments, Precision.E5M3, None)
    monkeypatch.undo()


@pytest.mark.parametrize("device", [LIMITS, calls.Device(132, 228 * 1024), calls.Device(188, 100 * 1024)], ids=str)
def test_plans_fit_the_device_and_cover_the_weight(device: calls.Device) -> None:
    shapes = [(4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (128256, 4096), (576, 576), (49152, 576)]
    for rows, columns in [*shapes, (1, 1), (8192, 28672), (151936, 896), (4096, 32768)]:
        units = -(-columns // 256)
        for batch in (1, 8, 16):
            for extra in range(6):
                plan = calls.plan(rows, units, extra, batch, device)
                if plan is None:
                    # Sixteen rows of x need twice the registers, so half the columns fit.
                    assert columns > (16384 if batch == 16 or device.shared < LIMITS.shared else 32768)
                    continue
                assert plan.warps * plan.split >= units
                assert plan.warps <= calls.most_warps(plan.columns)
                assert plan.clusters <= -(-rows // 16)
                assert plan.stages >= 1
                assert plan.shared_bytes(rows) <= device.shared - 1024


def test_compiled_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC, which comes with torch for GPUs, is replaced: what is asked of it and kept is the point."""
    asked: list[list[str]] = []

    class Compiler:
        def nvrtcVersion(self, major: object, minor: object) -> int:  # noqa: N802
            return 0

    def compile_source(nvrtc: object, text: str, options: list[str]) -> bytes:
        asked.append(options)
        return " ".join(options).encode()

    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_nvrtc", Compiler)
    monkeypatch.setattr(compiler, "_compile", compile_source)
    first = compiler.compiled("matvec", "sm_90", (("OTARO_EXTRA", 1),))
    assert b"sm_90" in first
    assert b"-DOTARO_EXTRA=1" in first
    assert compiler.compiled("matvec", "sm_90", (("OTARO_EXTRA", 1),)) == first
    assert compiler.compiled("matvec", "sm_100", (("OTARO_EXTRA", 1),)) != first
    assert len(asked) == 2
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 2
    monkeypatch.setenv(compiler.CACHE_VARIABLE, "/dev/null")
    assert compiler.compiled("matvec", "sm_90", (("OTARO_EXTRA", 1),)) == first
    assert len(asked) == 3


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("extra, columns, gated", [(0, 1, 0), (5, 8, 0), (1, 1, 1)])
def test_kernels_compile_without_spilling_registers(extra: int, columns: int, gated: int, tmp_path: Path) -> None:
    source = tmp_path / "kernels.cu"
    source.write_text(compiler.source("matvec"))
    threads = 32 * calls.most_warps(columns)
    names = {"EXTRA": extra, "COLUMNS": columns, "GATED": gated, "THREADS": threads}
    definitions = [f"-DOTARO_{name}={value}" for name, value in names.items()]
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas", "-v", *definitions, str(source), "-o"]
    done = subprocess.run([*command, str(tmp_path / "kernels.cubin")], check=True, capture_output=True, text=True)
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "rows, columns, batch, dtype",
    [
        (5, 70, 1, torch.float16),
        (20, 600, 5, torch.bfloat16),
        (9, 2100, 16, torch.float16),
        (24, 4500, 1, torch.bfloat16),
    ],
)
def test_gated_products(rows: int, columns: int, batch: int, dtype: torch.dtype) -> None:
    """silu(gate) · up in the product's own launch, rows of both in turns of eight."""
    tiles = -(-rows // 8)
    planes, fragments = packed(16 * tiles, columns, seed=rows)
    x = torch.randn(batch, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(16 * tiles).to(dtype)
    for precision in (Precision.E5M3, Precision.E5M4, Precision.E5M8):
        used = Fragments(fragments.base, fragments.bits[: precision.mantissa - 3], fragments.scale, fragments.shape, 64)
        result = cuda.multiply(x, used, precision, bias, False, gated=rows)
        both = expected(x, planes, precision, FORMAT, bias).unflatten(1, (tiles, 2, 8))
        wanted = torch.nn.functional.silu(both[:, :, 0]) * both[:, :, 1]
        assert result is not None
        assert_close(result, wanted.flatten(1)[:, :rows])
