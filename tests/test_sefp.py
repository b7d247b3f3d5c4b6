"""The codec: its definition worked out by hand, and the promises that hold for every weight."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hard_weights import DTYPES, FORMATS, bits, formats, precisions, weights
from hypothesis import given, settings
from torch import Tensor

import otaro
from otaro import packing, sefp
from otaro.errors import FormatError, OtaroError, PrecisionError, WeightError
from otaro.precision import WIDEST, Precision, parse_precisions
from otaro.sefp import Format

PROPERTY = settings(max_examples=150, deadline=None)


def rounded(value: Fraction) -> Fraction:
    """The float32 nearest to a value, ties to even."""
    return Fraction(float(torch.tensor(float(value), dtype=torch.float64).float()))


def by_hand(row: list[float], precision: Precision, format: Format) -> list[Fraction]:
    """The values of one group, from the definition, in exact arithmetic but for the one product that is rounded."""
    m = precision.mantissa
    exact = [Fraction(weight) for weight in row]
    largest = max(abs(weight) for weight in exact)
    if largest == 0:
        return [Fraction(0)] * len(row)
    exponent = max(-14, min(15, math.frexp(float(largest))[1] - 1))
    if format.scheme != "nested":
        step = Fraction(2) ** (exponent + 1 - m)
        rounding = math.floor if format.scheme == "truncate" else round
        return [min(rounding(abs(w) / step), 2**m - 1) * step * (-1 if w < 0 else 1) for w in exact]
    negated = max(exact) == largest and -min(exact) < largest
    if negated:
        exact = [-weight for weight in exact]

    def values(scale: Fraction, quarters: int, m: int) -> list[Fraction]:
        inverse = rounded(Fraction(4, quarters)) / (scale / Fraction(quarters, 4) / 128)
        bias = Fraction(1, 2) - Fraction(17, 2) * 2 ** (m - 3)
        result = []
        for weight in exact:
            product = weight * inverse
            cell = math.floor(rounded(product)) if abs(product) > Fraction(2) ** -120 else -(weight < 0)
            code = max(16, min(511, cell + 272))
            result.append(((code >> (8 - m)) + bias) * scale * Fraction(2) ** (1 - m))
        return result

    candidates = [(Fraction(2) ** exponent * Fraction(q, 4), q) for q in (5, 4)]
    if exponent > -14:
        candidates += [(Fraction(2) ** (exponent - 1) * Fraction(q, 4), q) for q in (7, 6, 5, 4)]
    unit = Fraction(2) ** (exponent - 11)
    targets = [2 * max(-2048, min(2047, math.floor(weight / unit / 2))) + 1 for weight in exact]

    def error(candidate: tuple[Fraction, int]) -> Fraction:
        decoded = values(*candidate, sefp.ERROR_WIDTH.mantissa)
        return sum(((t - v / unit) ** 2 for t, v in zip(targets, decoded, strict=True)), Fraction(0))

    best = min(candidates, key=error)
    return [-value if negated else value for value in values(*best, m)]


@PROPERTY
@given(weights(), formats, precisions)
def test_values_follow_the_definition(weight: Tensor, format: Format, precision: Precision) -> None:
    decoded = sefp.decode(sefp.encode(weight, precision, format))
    row, values = weight.reshape(-1, weight.shape[-1])[-1], decoded.reshape(-1, weight.shape[-1])[-1]
    for start in range(0, len(row), format.group_size):
        group = slice(start, start + format.group_size)
        assert [Fraction(v) for v in values[group].tolist()] == by_hand(row[group].tolist(), precision, format)


@PROPERTY
@given(weights(), formats, precisions)
def test_cutting_the_widest_codes_is_encoding(weight: Tensor, format: Format, precision: Precision) -> None:
    cut = sefp.truncate(sefp.encode(weight, WIDEST, format), precision)
    direct = sefp.encode(weight, precision, format)
    assert torch.equal(cut.scale, direct.scale)
    if format.scheme != "nearest":
        assert torch.equal(cut.code, direct.code)
    else:
        size = sefp.step(cut.scale, precision).repeat_interleave(format.group_size, -1)[..., : weight.shape[-1]]
        # Rounded twice: never more than one step from what is rounded once.
        assert bool(((sefp.decode(cut) - sefp.decode(direct)).abs() <= size).all())


@PROPERTY
@given(weights(), formats, precisions, precisions)
def test_cutting_twice_is_cutting_once(weight: Tensor, format: Format, first: Precision, then: Precision) -> None:
    if format.scheme == "nearest" or then > first:
        return
    codes = sefp.encode(weight, WIDEST, format)
    twice, once = sefp.truncate(sefp.truncate(codes, first), then), sefp.truncate(codes, then)
    assert torch.equal(twice.code, once.code)


@PROPERTY
@given(weights(), formats, precisions)
def test_packing_and_unpacking_changes_nothing(weight: Tensor, format: Format, precision: Precision) -> None:
    codes = sefp.encode(weight, WIDEST, format)
    planes = packing.pack(codes)
    shapes = packing.plane_shapes(tuple(weight.shape), format)
    assert {name: tuple(plane.shape) for name, plane in planes.named().items()} == shapes
    prefix = planes.up_to(format.stored(precision))
    found, expected = packing.unpack(prefix, weight.shape[-1], precision, format), sefp.truncate(codes, precision)
    assert torch.equal(found.code, expected.code)
    assert torch.equal(found.scale, expected.scale)
    assert packing.Planes.from_named(planes.up_to(precision).named()).stored == precision


@PROPERTY
@given(weights(), formats)
def test_codes_of_a_width_pack_to_a_prefix(weight: Tensor, format: Format) -> None:
    if format.scheme == "nearest":
        return
    whole = packing.pack(sefp.encode(weight, WIDEST, format))
    part = packing.pack(sefp.encode(weight, Precision.E5M5, format))
    assert torch.equal(part.base, whole.base)
    assert all(torch.equal(*pair) for pair in zip(part.bits, whole.bits[:2], strict=True))


def test_bytes_lie_where_the_document_says() -> None:
    codes = sefp.Codes(
        torch.tensor([[0b101110001, 0b011001100]], dtype=torch.int16),
        torch.tensor([[0x36]], dtype=torch.uint8),
        WIDEST,
        Format(group_size=32),
    )
    planes = packing.pack(codes)
    assert planes.base[0, 0] == 0b0110_1011
    assert [int(plane[0, 0] & 3) for plane in planes.bits] == [0b01, 0b10, 0b10, 0b00, 0b01]
    assert planes.base[0, 1] == 0x88  # padding: the code of zero
    assert planes.scale.tolist() == [[0x36]]


@PROPERTY
@given(weights(), formats)
def test_scales_are_bytes_that_may_be_read(weight: Tensor, format: Format) -> None:
    scale = sefp.group_scales(weight, format)
    sefp.check_scales(scale, format, "a tensor")
    assert torch.equal(scale == 0, (sefp.in_groups(weight, format.group_size) == 0).all(-1))


def test_every_scale_is_half_a_half_float() -> None:
    scale = torch.arange(256).to(torch.uint8)
    halves = (scale.to(torch.int32) << 8).to(torch.uint16).view(torch.float16).float()
    valid = []
    for byte, value in enumerate(halves.tolist()):
        try:
            sefp.check_scales(scale[byte : byte + 1], Format(), "a tensor")
        except FormatError:
            continue
        valid.append(byte)
        assert float(sefp.step(scale[byte : byte + 1], Precision.E5M3)) == value / 4
    assert valid == [0, *range(0x04, 0x7C), *range(0x84, 0xFC)]
    with pytest.raises(FormatError, match="no scale"):
        sefp.check_scales(scale[5:6], Format("nearest"), "a tensor")


@PROPERTY
@given(weights(), precisions)
def test_a_value_keeps_its_code_under_its_scale(weight: Tensor, precision: Precision) -> None:
    codes = sefp.encode(weight, precision)
    again = sefp.encode_unchecked(sefp.decode(codes), precision, Format(), scale=codes.scale)
    assert torch.equal(again.code, codes.code)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS[:3], ids=str)
def test_quantize_keeps_shape_and_dtype_and_is_what_decode_gives(format: Format, dtype: torch.dtype) -> None:
    weight = torch.randn(3, 5, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    for precision in Precision:
        values = otaro.quantize(weight, str(precision), scheme=format.scheme, group_size=format.group_size)
        assert values.shape == weight.shape
        assert values.dtype == dtype
        expected = sefp.decode(sefp.encode(weight, precision, format), dtype)
        assert torch.equal(bits(values), bits(expected))


def test_quantize_passes_gradients_straight_through() -> None:
    weight = torch.randn(4, 64, requires_grad=True)
    coefficients = torch.randn(4, 64)
    (otaro.quantize(weight, "E5M3") * coefficients).sum().backward()
    assert torch.equal(weight.grad, coefficients)


def test_the_ops_keep_torchs_contract() -> None:
    weight = torch.randn(3, 64)
    torch.library.opcheck(torch.ops.otaro.quantize, (weight, 4, "nested", 64, [weight + 1], [3], None))
    planes = packing.pack(sefp.encode(weight))
    common = (planes.base, list(planes.bits), planes.scale, 64, 8, "nested", 64)
    torch.library.opcheck(torch.ops.otaro.dequantize, (*common, torch.float16))
    torch.library.opcheck(torch.ops.otaro.linear, (torch.randn(2, 64), *common, torch.randn(3)))
    torch.library.opcheck(torch.ops.otaro.embedding, (torch.tensor([[0, 2]]), *common, torch.float32))


def test_error_quarters_with_every_bit() -> None:
    weight = torch.randn(64, 640, generator=torch.Generator().manual_seed(0)) * 0.02
    errors = [float((otaro.quantize(weight, p) - weight).square().mean()) for p in Precision]
    for finer, coarser in itertools.pairwise(errors):
        assert 3.0 < coarser / finer < 5.0 or finer < errors[2]  # the scale serves the narrow widths: it may clip


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_is_not_finite_is_named_by_its_position(bad: float, dtype: torch.dtype) -> None:
    weight = torch.zeros(3, 4, 70, dtype=dtype)
    weight[1, 2, 65] = bad
    weight[2, 0, 0] = bad
    for function in (lambda: otaro.quantize(weight, "E5M4"), lambda: otaro.encode(weight)):
        with pytest.raises(WeightError, match=r"at \[1, 2, 65\]"):
            function()


def test_wrong_settings_are_refused_in_words() -> None:
    weight = torch.zeros(2, 64)
    with pytest.raises(PrecisionError, match="E5M8, E5M7, E5M6, E5M5, E5M4, E5M3"):
        otaro.quantize(weight, "E5M2")
    with pytest.raises(FormatError, match="truncate, nearest, nested"):
        otaro.quantize(weight, "E5M4", scheme="random")
    with pytest.raises(FormatError, match="32, 64, 128, 256"):
        otaro.quantize(weight, "E5M4", group_size=48)
    with pytest.raises(WeightError, match="float64"):
        otaro.quantize(weight.double(), "E5M4")
    with pytest.raises(WeightError, match="no row"):
        otaro.quantize(weight[:0], "E5M4")
    with pytest.raises(FormatError, match="cannot be widened"):
        sefp.truncate(sefp.encode(weight, Precision.E5M4), Precision.E5M5)


def test_precisions_parse_compare_and_list() -> None:
    assert Precision("e5m4") is Precision.E5M4
    assert max(Precision) is Precision.E5M8
    assert sorted(Precision)[0] is Precision.E5M3
    assert [p.mantissa for p in Precision] == [8, 7, 6, 5, 4, 3]
    assert parse_precisions("all") == list(Precision)
    assert parse_precisions("E5M3, e5m8") == [Precision.E5M3, Precision.E5M8]
    with pytest.raises(OtaroError, match="not available here"):
        parse_precisions("E5M8", [Precision.E5M4, Precision.E5M3])
