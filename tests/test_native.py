"""The native core against the torch codec, bit for bit, on every instruction set of this machine."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hard_weights import COLUMNS, DTYPES, FORMATS, bits, formats, hard_weight, precisions, to_dtype, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from otaro import packing, sefp
from otaro.errors import FormatError, PrecisionError, WeightError
from otaro.ops import cpu, reference
from otaro.packing import Planes
from otaro.precision import NARROWEST, WIDEST, Precision
from otaro.sefp import Codes, Format

ISAS = cpu.isas()
PROPERTY = settings(max_examples=120, deadline=None)


def assert_same(native: Tensor, reference: Tensor, *context: object) -> None:
    assert native.dtype == reference.dtype, context
    assert native.shape == reference.shape, context
    assert torch.equal(bits(native), bits(reference)), (*context, native, reference)


def assert_same_planes(native: Planes, reference: Planes, *context: object) -> None:
    assert len(native.bits) == len(reference.bits)
    assert_same(native.base, reference.base, "base", *context)
    for number, (plane, expected) in enumerate(zip(native.bits, reference.bits, strict=True)):
        assert_same(plane, expected, "bits", number, *context)
    assert_same(native.scale, reference.scale, "scale", *context)


def assert_same_codes(native: Codes, reference: Codes, *context: object) -> None:
    assert (native.precision, native.format) == (reference.precision, reference.format)
    assert_same(native.code, reference.code, "code", *context)
    assert_same(native.scale, reference.scale, "scale", *context)


# ---- the codec ------------------------------------------------------------------------------------------------------


def test_library_is_there() -> None:
    assert cpu.available() is None
    assert cpu.isas()[0] == "reference"
    assert cpu.isa() in cpu.isas()


def check_codec(weight: Tensor, format: Format, precision: Precision) -> None:
    columns, dtype = weight.shape[-1], weight.dtype
    codes = sefp.encode(weight, precision, format)
    widest = sefp.encode(weight, WIDEST, format)
    planes = packing.pack(widest)
    value = sefp.decode(codes, dtype)
    sliced = packing.unpack(planes, columns, precision, format)
    dequantized = {kind: sefp.decode(sliced, kind) for kind in DTYPES}
    needed = format.stored(precision).mantissa - NARROWEST.mantissa
    enough = Planes(planes.base, planes.bits[:needed], planes.scale)
    for isa in ISAS:
        assert_same(cpu.scales(weight, format, isa=isa), codes.scale, "scales", isa)
        assert_same_codes(cpu.encode(weight, precision, format, isa=isa), codes, isa)
        assert_same(cpu.quantize(weight, precision, format, isa=isa), value, "quantize", isa)
        assert_same_codes(cpu.truncate(widest, precision, isa=isa), sefp.truncate(widest, precision), "truncate", isa)
        assert_same_planes(cpu.pack(weight, format, isa=isa)[0], planes, isa)
        for kind, expected in dequantized.items():
            assert_same(cpu.decode(sliced, kind, isa=isa), expected, "decode", isa)
            native = cpu.dequantize(enough, columns, precision, format, kind, isa=isa)
            assert_same(native, expected, "dequantize", isa)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: "-".join(map(str, vars(format).values())))
def test_every_format_at_every_width(format: Format, dtype: torch.dtype) -> None:
    weight = hard_weight(format.group_size + 5, dtype)
    for precision in Precision:
        check_codec(weight, format, precision)


@PROPERTY
@given(weights(), formats, precisions)
def test_any_weight(weight: Tensor, format: Format, precision: Precision) -> None:
    check_codec(weight, format, precision)


@pytest.mark.parametrize("columns", COLUMNS)
def test_every_row_length(columns: int) -> None:
    for format, dtype in itertools.product((Format(), Format("nearest", 32)), DTYPES):
        check_codec(hard_weight(columns, dtype, seed=columns), format, Precision.E5M4)


def some_scales(shape: tuple[int, ...], format: Format, generator: torch.Generator) -> Tensor:
    """Scales of a format, any of them."""
    scales = [0, *range(sefp.SCALE_MIN, sefp.SCALE_MAX + 1, 1 if format.scheme == "nested" else 4)]
    if format.scheme == "nested":
        scales += [scale | sefp.SCALE_SIGN for scale in scales[1:]]
    return torch.tensor(scales, dtype=torch.uint8)[torch.randint(0, len(scales), shape, generator=generator)]


@PROPERTY
@given(weights(), formats, precisions, st.integers(0, 2**32 - 1))
def test_any_weight_under_any_scale(weight: Tensor, format: Format, precision: Precision, seed: int) -> None:
    """Scales that are given are taken as they are, whether or not the weight would have found them."""
    found = sefp.group_scales(weight, format)
    generator = torch.Generator().manual_seed(seed)
    for scale in (found, found.roll(1, -1), some_scales(tuple(found.shape), format, generator)):
        codes = sefp.encode_unchecked(weight, precision, format, scale=scale)
        planes, clamped = reference.pack(weight, format, scale)
        tiers = [(Precision.E5M4, weight.flip(-1))] if format.scheme == "nested" else []
        value = reference.quantize(weight, precision, format, tiers, scale)
        for isa in ISAS:
            assert_same_codes(cpu.encode(weight, precision, format, scale, isa=isa), codes, isa)
            native, counted = cpu.pack(weight, format, scale, isa=isa)
            assert_same_planes(native, planes, isa)
            assert_same(counted, clamped, isa)
            assert_same(cpu.quantize(weight, precision, format, tiers, scale, isa=isa), value, "quantize", isa)


NESTED = [format for format in FORMATS if format.scheme == "nested"]
TIERS = ([3], [4], [3, 4], [3, 5, 8], [3, 4, 5, 6, 7, 8])


def check_tiers(weight: Tensor, tiers: list[Tensor], widths: list[int], format: Format) -> None:
    listed = [(Precision.from_mantissa(width), tier) for width, tier in zip(widths, tiers, strict=True)]
    for precision in Precision:
        expected = sefp.decode(sefp.encode_unchecked(weight, precision, format, listed), weight.dtype)
        for isa in ISAS:
            assert_same(cpu.quantize(weight, precision, format, listed, isa=isa), expected, isa, precision, widths)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", NESTED, ids=lambda format: "-".join(map(str, vars(format).values())))
def test_tiers_of_every_format(format: Format, dtype: torch.dtype) -> None:
    """Tiers near their weight, as in training, and tiers that have nothing to do with it."""
    weight = hard_weight(format.group_size + 5, dtype)
    generator = torch.Generator().manual_seed(1)
    scale = weight.float().abs().amax(-1, keepdim=True).clamp(max=1e30)
    noise = torch.randn((2, *weight.shape), generator=generator)
    near = [to_dtype(weight.float() + 0.2 * scale * step, dtype) for step in noise]
    check_tiers(weight, near, [3, 4], format)
    check_tiers(weight, [weight.roll(1, 0), weight.roll(5, 0)], [3, 4], format)


@PROPERTY
@given(weights(), st.sampled_from(NESTED), st.sampled_from(TIERS), st.integers(0, 2**32 - 1))
def test_any_tiers(weight: Tensor, format: Format, widths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(weight.numel(), generator=generator) for _ in widths]
    check_tiers(weight, [weight.flatten()[order].view(weight.shape) for order in orders], widths, format)


def test_tiers_of_any_strides_and_no_others() -> None:
    weight, tier = torch.randn(2, 96, 40)
    expected = sefp.decode(sefp.encode_unchecked(weight.T, WIDEST, Format(), [(NARROWEST, tier.T)]))
    assert_same(cpu.quantize(weight.T, WIDEST, Format(), [(NARROWEST, tier.T)]), expected)
    for other in (tier, tier.T.double(), tier.T[:-1]):
        with pytest.raises(TypeError, match="tiers must be"):
            cpu.quantize(weight.T, WIDEST, Format(), [(NARROWEST, other)])


@PROPERTY
@given(formats, precisions, st.sampled_from(COLUMNS), st.integers(0, 2**32 - 1))
def test_any_codes(format: Format, precision: Precision, columns: int, seed: int) -> None:
    """Decoding and cutting do not rely on what the encoder happens to produce."""
    generator = torch.Generator().manual_seed(seed)
    code = torch.randint(0, 2 << precision.mantissa, (3, columns), generator=generator, dtype=torch.int16)
    shape = (3, format.groups(columns))
    codes = Codes(code, some_scales(shape, format, generator), precision, format)
    for isa in ISAS:
        for dtype in DTYPES:
            assert_same(cpu.decode(codes, dtype, isa=isa), sefp.decode(codes, dtype), isa)
        for narrower in (other for other in Precision if other <= precision):
            assert_same_codes(cpu.truncate(codes, narrower, isa=isa), sefp.truncate(codes, narrower), isa)


@PROPERTY
@given(weights(), formats)
def test_clamped_groups_are_counted(weight: Tensor, format: Format) -> None:
    largest = sefp.in_groups(weight.float().abs(), format.group_size).amax(-1)
    below = int(((largest > 0) & (largest < 2.0**sefp.EXPONENT_MIN)).sum())
    above = int((largest >= 2.0 ** (sefp.EXPONENT_MAX + 1)).sum())
    for isa in ISAS:
        assert cpu.pack(weight, format, isa=isa)[1].tolist() == [below, above]


@PROPERTY
@given(weights(), st.data())
def test_first_weight_that_is_not_finite_is_named(weight: Tensor, data: st.DataObject) -> None:
    weight = weight.clone()
    for index in data.draw(st.lists(st.integers(0, weight.numel() - 1), min_size=1, max_size=3)):
        weight.view(-1)[index] = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    with pytest.raises(WeightError) as expected:
        sefp.check_weight(weight)
    for isa in ISAS:
        with pytest.raises(WeightError) as packed:
            cpu.pack(weight, Format(), isa=isa)
        with pytest.raises(WeightError) as encoded:
            cpu.encode(weight, Precision.E5M4, Format(), isa=isa)
        assert str(packed.value) == str(encoded.value) == str(expected.value)
        assert cpu.quantize(weight, Precision.E5M4, Format(), isa=isa).shape == weight.shape  # unspecified, but there


def test_first_of_several_bad_weights_across_threads() -> None:
    """The bad weight of the second range of work is met long before that of the first."""
    weight = torch.randn(2000, 64)
    weight[511, 63] = weight[512, 0] = float("nan")
    slow = Format()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in range(20):
            with pytest.raises(WeightError, match=r"at \[511, 63\]"):
                cpu.pack(weight, slow, isa="reference")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("weight", [torch.zeros(3, dtype=torch.float64), torch.zeros(()), torch.zeros(4, 0)], ids=str)
def test_what_cannot_be_encoded_is_refused_alike(weight: Tensor) -> None:
    with pytest.raises(WeightError) as expected:
        sefp.check_weight(weight)
    with pytest.raises(WeightError) as packed:
        cpu.pack(weight, Format())
    assert str(packed.value) == str(expected.value)


def test_any_strides() -> None:
    weight = torch.randn(6, 5, 96).permute(1, 2, 0)[:, ::2]
    assert not weight.is_contiguous()
    planes, _ = cpu.pack(weight, Format())
    assert_same_planes(planes, packing.pack(sefp.encode(weight)))
    strided = Planes(
        planes.base.repeat_interleave(2, 0)[::2],
        tuple(plane.repeat_interleave(2, 0)[::2] for plane in planes.bits),
        planes.scale.repeat_interleave(2, 0)[::2],
    )
    value = cpu.dequantize(strided, 6, Precision.E5M5, Format(), torch.float32)
    assert_same(value, sefp.decode(sefp.encode(weight, Precision.E5M5)))
    assert_same(cpu.quantize(weight, Precision.E5M5, Format()), value)


def test_planes_must_hold_what_is_asked_for() -> None:
    planes, _ = cpu.pack(torch.randn(3, 100), Format("nearest"))
    narrow = Planes(planes.base, planes.bits[:2], planes.scale)
    cpu.dequantize(narrow, 100, Precision.E5M4, Format("nearest"), torch.float32)
    with pytest.raises(PrecisionError, match="E5M5 needs the bits of E5M6"):
        cpu.dequantize(narrow, 100, Precision.E5M5, Format("nearest"), torch.float32)
    with pytest.raises(FormatError, match="columns"):
        cpu.dequantize(planes, 200, Precision.E5M3, Format("nearest"), torch.float32)
    short = Planes(planes.base, planes.bits, planes.scale[..., :-1])
    with pytest.raises(FormatError, match="sefp_scale is"):
        cpu.dequantize(short, 100, Precision.E5M3, Format("nearest"), torch.float32)


NO_SCALES = {"nested": [0x80, 0x01, 0x03, 0x81, 0x83, 0x7C, 0x7F, 0xFC, 0xFF]}
NO_SCALES["truncate"] = NO_SCALES["nearest"] = [*NO_SCALES["nested"], 0x05, 0x06, 0x07, 0x7B, 0x84, 0xBC]


@pytest.mark.parametrize("scheme", NO_SCALES)
def test_every_byte_is_a_scale_or_refused(scheme: sefp.Scheme) -> None:
    """Wherever in a tensor it lies, by all that reads it, and the same bytes as the definition refuses."""
    format, columns = Format(scheme, 32), 32 * 75
    weight = torch.randn(1, columns)
    planes, _ = cpu.pack(weight, format)
    for byte, place in itertools.product(range(256), (0, 37, 74)):
        scale = planes.scale.clone()
        scale[0, place] = byte
        try:
            sefp.check_scales(scale, format, "a tensor")
        except FormatError:
            with pytest.raises(FormatError, match="no scale"):
                cpu.quantize(weight, Precision.E5M4, format, (), scale)
        else:
            assert byte not in NO_SCALES[scheme]
            cpu.quantize(weight, Precision.E5M4, format, (), scale)
    spoilt = planes.scale.clone()
    spoilt[0, 50] = NO_SCALES[scheme][-1]
    bad, codes = Planes(planes.base, planes.bits, spoilt), cpu.encode(weight, WIDEST, format)
    ids = torch.tensor([0])
    for read in (
        lambda: cpu.dequantize(bad, columns, WIDEST, format, torch.float32),
        lambda: cpu.linear(weight, bad, columns, WIDEST, format),
        lambda: cpu.embedding(ids, bad, columns, WIDEST, format, torch.float32),
        lambda: cpu.decode(Codes(codes.code, spoilt, WIDEST, format)),
        lambda: cpu.encode(weight, WIDEST, format, spoilt),
        lambda: cpu.pack(weight, format, spoilt),
    ):
        with pytest.raises(FormatError, match="no scale"):
            read()


def test_a_scale_of_another_shape_is_refused() -> None:
    weight = torch.randn(3, 100)
    for scale in (torch.full((3, 1), 60, dtype=torch.uint8), torch.full((3, 2), 60, dtype=torch.int16)):
        with pytest.raises(FormatError, match="the scale is"):
            cpu.quantize(weight, Precision.E5M4, Format(), (), scale)


# ---- rows and products ----------------------------------------------------------------------------------------------


@PROPERTY
@given(formats, precisions, st.sampled_from(COLUMNS), st.lists(st.integers(0, 19), max_size=7), st.sampled_from(DTYPES))
def test_embedding(format: Format, precision: Precision, columns: int, ids: list[int], dtype: torch.dtype) -> None:
    weight = hard_weight(columns, torch.float32)
    planes, _ = cpu.pack(weight, format)
    rows = torch.tensor(ids, dtype=torch.int64)
    expected = sefp.decode(packing.unpack(planes, columns, precision, format), dtype)[rows]
    for isa in ISAS:
        assert_same(cpu.embedding(rows, planes, columns, precision, format, dtype, isa=isa), expected, isa)


@pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**63)])
def test_embedding_refuses_rows_that_are_not_there(bad: int) -> None:
    planes, _ = cpu.pack(torch.randn(4, 70), Format())
    ids = torch.tensor([[0, 3], [bad, 1]])
    with pytest.raises(IndexError, match="4 rows"):
        cpu.embedding(ids, planes, 70, Precision.E5M4, Format(), torch.float32)
    assert cpu.embedding(ids.clamp(0, 3), planes, 70, Precision.E5M4, Format(), torch.float32).shape == (2, 2, 70)


@PROPERTY
@given(formats, precisions, st.sampled_from((*COLUMNS, 1100)), st.integers(1, 18), st.booleans(), st.integers(0, 2**32))
def test_linear(format: Format, precision: Precision, columns: int, batch: int, with_bias: bool, seed: int) -> None:
    """Against float64. However K products are added in float32, the error is below (K + 2)·2^-24·(Σ|x·w| + |bias|)."""
    generator = torch.Generator().manual_seed(seed)
    planes, _ = cpu.pack(torch.randn(11, columns, generator=generator), format)
    x = torch.randn(batch, columns, generator=generator)
    bias = torch.randn(11, generator=generator) if with_bias else None
    weight = cpu.dequantize(planes, columns, precision, format, torch.float32).double()
    offset = 0.0 if bias is None else bias.double()
    expected = x.double() @ weight.T + offset
    budget = (columns + 2) * 2**-24 * (x.double().abs() @ weight.T.abs() + abs(offset)) + 1e-300
    for isa in ISAS:
        y = cpu.linear(x, planes, columns, precision, format, bias, isa=isa)
        assert y.dtype == torch.float32
        assert bool(((y.double() - expected).abs() <= budget).all()), (isa, (y - expected).abs().max())
        alone = cpu.linear(x[batch // 2], planes, columns, precision, format, bias, isa=isa)
        assert_same(alone, y[batch // 2], "a vector alone and in company", isa)


# ---- threads --------------------------------------------------------------------------------------------------------


def everything(weight: Tensor, format: Format, isa: str) -> list[Tensor]:
    columns = weight.shape[-1]
    planes, clamped = cpu.pack(weight, format, isa=isa)
    codes = cpu.encode(weight, Precision.E5M6, format, isa=isa)
    ids = torch.arange(0, weight.shape[0], 3)
    x = torch.linspace(-1, 1, 3 * columns).view(3, columns)
    return [
        planes.base,
        *planes.bits,
        *(planes.scale, cpu.scales(weight, format, isa=isa)),
        clamped,
        *(codes.code, codes.scale, cpu.decode(codes, isa=isa)),
        cpu.truncate(codes, Precision.E5M3, isa=isa).code,
        cpu.quantize(weight, Precision.E5M3, format, isa=isa),
        cpu.quantize(weight, Precision.E5M8, format, [(Precision.E5M4, weight.flip(0))], isa=isa),
        cpu.dequantize(planes, columns, Precision.E5M7, format, torch.bfloat16, isa=isa),
        cpu.embedding(ids, planes, columns, Precision.E5M5, format, torch.float16, isa=isa),
        cpu.linear(x, planes, columns, Precision.E5M4, format, isa=isa),
    ]


@pytest.mark.parametrize("isa", ISAS)
def test_results_do_not_depend_on_the_number_of_threads(isa: str) -> None:
    weight = torch.randn(301, 1001) * torch.exp2(torch.randint(-18, 18, (301, 1)).float())
    format = Format()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(everything(weight, format, isa))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert_same(one, two)


def test_calls_from_several_threads_at_once() -> None:
    weights = [torch.randn(150, 900) * 2.0**number for number in range(4)]
    expected = [sefp.decode(sefp.encode(weight, Precision.E5M4)) for weight in weights]

    def work(number: int) -> Tensor:
        for _ in range(20):
            result = cpu.quantize(weights[number], Precision.E5M4, Format())
        return result

    with ThreadPoolExecutor(4) as pool:
        for result, value in zip(pool.map(work, range(4)), expected, strict=True):
            assert_same(result, value)


def test_a_forked_child_makes_its_own_threads() -> None:
    program = """
import os, torch
from otaro import sefp
from otaro.ops import cpu, reference
torch.set_num_threads(2)
weight = torch.randn(200, 1000)
expected = cpu.quantize(weight, sefp.Precision.E5M4, sefp.Format()).numpy().tobytes()
child = os.fork()
if child == 0:
    same = cpu.quantize(weight, sefp.Precision.E5M4, sefp.Format()).numpy().tobytes() == expected
    helped = not os.path.isdir("/proc/self/task") or len(os.listdir("/proc/self/task")) > 1
    os._exit(0 if same and helped else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    finished = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert finished.returncode == 0


def test_the_callers_float_mode_does_not_matter() -> None:
    weight = hard_weight(300, torch.float32)
    planes = packing.pack(sefp.encode(weight))
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor cannot flush subnormals")
    try:
        native, _ = cpu.pack(weight, Format())
    finally:
        torch.set_flush_denormal(False)
    assert_same_planes(native, planes)


# ---- the C ABI ------------------------------------------------------------------------------------------------------

OK, ARGUMENT, BUFFER, NOT_FINITE, INDEX, ISA, PLANES, _, SCALE = range(9)
ROWS, K = 3, 70


class Arguments:
    """Valid arguments of every function, by name, for one to be spoilt at a time."""

    def __init__(self) -> None:
        groups, padded = ROWS * 2, ROWS * 128
        self.buffers = {
            "weight": torch.randn(ROWS * K),
            "tier": torch.randn(ROWS * K),
            "value": torch.zeros(ROWS * K),
            "base": torch.zeros(padded // 2, dtype=torch.uint8),
            **{f"bit{number}": torch.zeros(padded // 8, dtype=torch.uint8) for number in range(5)},
            "scale": torch.full((groups,), 60, dtype=torch.uint8),
            "given": torch.full((groups,), 64, dtype=torch.uint8),
            "code": torch.zeros(ROWS * K, dtype=torch.int16),
            "result": torch.zeros(ROWS * K, dtype=torch.int16),
            "code_scale": torch.full((groups,), 60, dtype=torch.uint8),
            "index": torch.tensor([2, 0]),
            "rows": torch.zeros(2 * K),
            "x": torch.randn(2 * K),
            "bias": torch.randn(ROWS),
            "y": torch.zeros(2 * ROWS),
        }
        self.bytes = {name: tensor.numel() * tensor.element_size() for name, tensor in self.buffers.items()}
        self.format = [2, 64]
        self.values = {"rows": ROWS, "columns": K, "mantissa": 8, "dtype": 0, "threads": 2, "isa": 0, "batch": 2}
        self.values |= {"count": ROWS * K, "ids": 2, "from": 8, "to": 3, "scheme": 2, "planes": 5, "tiers": 2}
        self.tiers = [3, 4]
        self.null: set[str] = set()

    def data(self, name: str) -> tuple[int | None, int]:
        return None if name in self.null else self.buffers[name].data_ptr(), self.bytes[name]

    def call(self, function: str) -> int:
        value = self.values
        planes = cpu._CPlanes(
            *self.data("base"),
            (ctypes.c_void_p * 5)(*(self.data(f"bit{number}")[0] for number in range(5))),
            (ctypes.c_int64 * 5)(*(self.data(f"bit{number}")[1] for number in range(5))),
            value["planes"],
            *self.data("scale"),
        )
        codes = cpu._CCodes(*self.data("code"), *self.data("code_scale"))
        tier, tier_bytes = self.data("tier")
        tiers = cpu._CTiers((tier,) * 6, (tier_bytes,) * 6, tuple(self.tiers), value["tiers"])
        head = (ctypes.byref(cpu._CFormat(*self.format)), value["rows"], value["columns"])
        tail = (value["threads"], value["isa"])
        packed = (ctypes.byref(planes), value["mantissa"])
        index, clamped = ctypes.c_int64(), (ctypes.c_int64 * 2)()
        weight, out, dtype, mantissa = self.data("weight"), self.data("value"), value["dtype"], value["mantissa"]
        given, found = self.data("given"), ctypes.byref(index)
        arguments: dict[str, tuple[object, ...]] = {
            "scales": (*head, *weight, dtype, *self.data("scale"), *tail),
            "encode": (*head, *weight, dtype, mantissa, *given, ctypes.byref(codes), found, *tail),
            "decode": (*head, ctypes.byref(codes), mantissa, *out, dtype, *tail),
            "truncate": (
                *(value["scheme"], value["count"], *self.data("code"), value["from"], value["to"]),
                *(*self.data("result"), *tail),
            ),
            "pack": (*head, *weight, dtype, *given, ctypes.byref(planes), ctypes.byref(clamped), found, *tail),
            "dequantize": (*head, *packed, *out, dtype, *tail),
            "quantize": (*head, *weight, dtype, mantissa, ctypes.byref(tiers), *given, *out, *tail),
            "rows": (*head, *packed, *self.data("index"), value["ids"], *self.data("rows"), dtype, *tail),
            "linear": (*head, *packed, *self.data("x"), value["batch"], *self.data("bias"), *self.data("y"), *tail),
        }
        return int(getattr(cpu.library(), f"otaro_{function}")(*arguments[function]))


PLANE_BUFFERS = ("base", "bit0", "bit1", "bit2", "bit3", "bit4", "scale")
CODE_BUFFERS = ("code", "code_scale")
OPTIONAL = ("bias", "given")
BUFFERS = {
    "scales": ("weight", "scale"),
    "encode": ("weight", "given", *CODE_BUFFERS),
    "decode": ("value", *CODE_BUFFERS),
    "truncate": ("code", "result"),
    "pack": ("weight", "given", *PLANE_BUFFERS),
    "dequantize": ("value", *PLANE_BUFFERS),
    "quantize": ("weight", "tier", "given", "value"),
    "rows": ("index", "rows", *PLANE_BUFFERS),
    "linear": ("x", "bias", "y", *PLANE_BUFFERS),
}


@pytest.mark.parametrize("function", BUFFERS)
def test_buffers_too_small_are_refused(function: str) -> None:
    assert Arguments().call(function) == OK
    for name in BUFFERS[function]:
        arguments = Arguments()
        before = {other: tensor.clone() for other, tensor in arguments.buffers.items()}
        arguments.bytes[name] -= 1
        assert arguments.call(function) == BUFFER, name
        for other, tensor in arguments.buffers.items():
            assert_same(tensor, before[other], "written in spite of the error", other)
        arguments = Arguments()
        arguments.null.add(name)
        assert arguments.call(function) == (OK if name in OPTIONAL else ARGUMENT), name


@pytest.mark.parametrize("function", BUFFERS)
def test_settings_out_of_range_are_refused(function: str) -> None:
    bad: list[tuple[str, int, int]] = [("threads", 0, ARGUMENT), ("threads", -5, ARGUMENT), ("isa", 5, ARGUMENT)]
    bad += [("isa", -1, ARGUMENT), ("isa", 2 if "neon" in ISAS else 4, ISA)]
    if function == "truncate":
        bad += [("scheme", 3, ARGUMENT), ("count", -1, ARGUMENT), ("to", 2, ARGUMENT), ("from", 9, ARGUMENT)]
        bad += [("count", 2**62, ARGUMENT)]
    else:
        bad += [("rows", -1, ARGUMENT), ("columns", -1, ARGUMENT), ("rows", 2**62, ARGUMENT)]
        bad += [("columns", 2**63 - 1, ARGUMENT), ("rows", ROWS + 8, BUFFER), ("columns", 2**40, BUFFER)]
    if function not in ("truncate", "pack", "scales"):
        bad += [("mantissa", 2, ARGUMENT), ("mantissa", 9, ARGUMENT)]
    if function not in ("truncate", "linear"):
        bad += [("dtype", 3, ARGUMENT), ("dtype", -1, ARGUMENT)]
    if function in ("dequantize", "rows", "linear"):
        bad += [("planes", 4, PLANES), ("planes", 6, ARGUMENT), ("planes", -1, ARGUMENT)]
    if function == "quantize":
        bad += [("tiers", -1, ARGUMENT), ("tiers", 7, ARGUMENT)]
    if function == "rows":
        bad += [("ids", -1, ARGUMENT), ("ids", 3, BUFFER), ("ids", 2**62, ARGUMENT)]
    if function == "linear":
        bad += [("batch", -1, ARGUMENT), ("batch", 3, BUFFER), ("batch", 2**62, ARGUMENT)]
    for name, value, error in bad:
        arguments = Arguments()
        arguments.values[name] = value
        assert arguments.call(function) == error, (name, value)
    if function != "truncate":
        for position, value in ((0, 3), (0, -1), (1, 48), (1, 0)):
            arguments = Arguments()
            arguments.format[position] = value
            assert arguments.call(function) == ARGUMENT, (position, value)


@pytest.mark.parametrize("widths", [[4, 3], [3, 3], [2, 4], [3, 9]], ids=str)
def test_tiers_must_be_widths_in_rising_order(widths: list[int]) -> None:
    arguments = Arguments()
    arguments.tiers = widths
    assert arguments.call("quantize") == ARGUMENT


def test_only_nested_has_tiers() -> None:
    arguments = Arguments()
    arguments.format = [1, 64]
    assert arguments.call("quantize") == ARGUMENT
    arguments.values["tiers"] = 0
    assert arguments.call("quantize") == OK


def test_a_product_of_no_vectors_ends_at_once_however_many_rows_there_are() -> None:
    arguments = Arguments()
    arguments.values |= {"rows": 2**62, "columns": 0, "batch": 0}
    arguments.null.add("bias")
    assert arguments.call("linear") == OK


def test_what_is_wrong_with_the_data_has_codes_of_its_own() -> None:
    arguments = Arguments()
    arguments.buffers["weight"][100] = float("inf")
    assert arguments.call("pack") == arguments.call("encode") == NOT_FINITE
    arguments.buffers["index"][1] = ROWS
    assert arguments.call("rows") == INDEX
    arguments = Arguments()
    for name in ("scale", "given", "code_scale"):
        arguments.buffers[name][-1] = 0x80
    for function in ("encode", "decode", "pack", "quantize", "dequantize", "rows", "linear"):
        assert arguments.call(function) == SCALE, function
    arguments.buffers["index"][:] = 1  # whose scales are good
    assert arguments.call("rows") == OK


@pytest.mark.parametrize("function", BUFFERS)
def test_nothing_to_do_is_fine(function: str) -> None:
    arguments = Arguments()
    arguments.values |= {"rows": 0, "count": 0, "batch": 0, "ids": 0}
    arguments.null |= set(arguments.buffers)
    assert arguments.call(function) == OK


def test_a_missing_library_is_explained(tmp_path: Path) -> None:
    program = "from otaro.ops import cpu; print(cpu.available())"
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    for path, reason in ((tmp_path / "missing.so", "is missing"), (broken, "cannot be loaded")):
        environment = {**os.environ, cpu.LIBRARY_VARIABLE: str(path)}
        output = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert reason in output.stdout, output
        assert str(path) in output.stdout
