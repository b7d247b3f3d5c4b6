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
from otaro.precision import NARROWEST, WIDEST, Precision, parse_precisions
from otaro.sefp import Format

PROPERTY = settings(max_examples=150, deadline=None)


def by_hand(row: list[float], precision: Precision, format: Format) -> list[Fraction]:
    """The values of one group, from the definition, in exact arithmetic."""
    m = precision.mantissa
    exact = [Fraction(weight) for weight in row]
    largest = max(abs(weight) for weight in exact)
    if largest == 0:
        return [Fraction(0)] * len(row)
    exponent = max(-14, min(15, math.frexp(float(largest))[1] - 1))
    negated = format.polarity and max(exact) == largest and -min(exact) < largest
    if negated:
        exact = [-weight for weight in exact]

    def values(exponent: int, m: int) -> list[Fraction]:
        step = Fraction(2) ** (exponent + 1 - m)
        result = []
        for weight in exact:
            if format.scheme == "truncate":
                magnitude = min(math.floor(abs(weight) / step), 2**m - 1)
                result.append(magnitude * step * (-1 if weight < 0 else 1))
            elif format.scheme == "nearest":
                magnitude = min(round(abs(weight) / step), 2**m - 1)
                result.append(magnitude * step * (-1 if weight < 0 else 1))
            else:
                finest, half = Fraction(2) ** (exponent - 7), Fraction(2) ** (exponent - 2) / 2
                code = math.floor((weight + half) / finest) + 256
                code = max(16 if format.polarity else 32, min(511, code))
                bias = Fraction(1, 2) - Fraction(17, 2) * 2 ** (m - 3)
                result.append(((code >> (8 - m)) + bias) * step)
        return result

    if format.exponent_by_error is not None and exponent > -14:
        errors = []
        unit = Fraction(2) ** (exponent - 15)
        for candidate in (exponent, exponent - 1):
            decoded = values(candidate, format.exponent_by_error.mantissa)
            counted = [max(-(2**20), min(2**20, math.floor(w / unit))) for w in exact]
            errors.append(sum((c - v / unit) ** 2 for c, v in zip(counted, decoded, strict=True)))
        if errors[1] < errors[0]:
            exponent -= 1
    return [-value if negated else value for value in values(exponent, m)]


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
    assert torch.equal(cut.exponent, direct.exponent)
    if format.scheme != "nearest":
        assert torch.equal(cut.code, direct.code)
    else:
        size = sefp.step(cut.exponent, precision).repeat_interleave(format.group_size, -1)[..., : weight.shape[-1]]
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
    assert tuple(planes.base.shape) == shapes["base"]
    assert tuple(planes.exponent.shape) == shapes["exponent"]
    assert all(tuple(plane.shape) == shapes["bit"] for plane in planes.bits)
    needed = format.stored(precision).mantissa - NARROWEST.mantissa
    prefix = packing.Planes(planes.base, planes.bits[:needed], planes.exponent, planes.polarity)
    found, expected = packing.unpack(prefix, weight.shape[-1], precision, format), sefp.truncate(codes, precision)
    assert torch.equal(found.code, expected.code)
    assert torch.equal(found.exponent, expected.exponent)
    assert (found.polarity is None) == (expected.polarity is None)
    if found.polarity is not None:
        assert torch.equal(found.polarity, expected.polarity)


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
        torch.tensor([[13], [31], [7]], dtype=torch.uint8)[:1],
        None,
        WIDEST,
        Format(group_size=32),
    )
    planes = packing.pack(codes)
    assert planes.base[0, 0] == 0b0110_1011
    assert [int(plane[0, 0] & 3) for plane in planes.bits] == [0b01, 0b10, 0b10, 0b00, 0b01]
    assert planes.base[0, 1] == 0x88  # padding: the code of zero
    assert packing.pack_stream(torch.tensor([13, 31, 7]), 5).tolist() == [0b111_01101, 0b0_00111_11]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS[:7], ids=str)
def test_quantize_keeps_shape_and_dtype_and_is_what_decode_gives(format: Format, dtype: torch.dtype) -> None:
    weight = torch.randn(3, 5, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    for precision in Precision:
        values = otaro.quantize(
            weight,
            str(precision),
            scheme=format.scheme,
            group_size=format.group_size,
            polarity=format.polarity,
            exponent_by_error=format.exponent_by_error,
        )
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
    torch.library.opcheck(torch.ops.otaro.quantize, (weight, 4, "nested", 64, False, 0, [weight + 1], [3]))
    planes = packing.pack(sefp.encode(weight))
    common = (planes.base, list(planes.bits), planes.exponent, None, 64, 8, "nested", 64)
    torch.library.opcheck(torch.ops.otaro.dequantize, (*common, torch.float16))
    torch.library.opcheck(torch.ops.otaro.linear, (torch.randn(2, 64), *common, torch.randn(3)))
    torch.library.opcheck(torch.ops.otaro.embedding, (torch.tensor([[0, 2]]), *common, torch.float32))


def test_error_halves_with_every_bit() -> None:
    weight = torch.randn(64, 640, generator=torch.Generator().manual_seed(0)) * 0.02
    errors = [float((otaro.quantize(weight, p, exponent_by_error=None) - weight).square().mean()) for p in Precision]
    for finer, coarser in itertools.pairwise(errors):
        assert 3.0 < coarser / finer < 5.0


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
    with pytest.raises(FormatError, match="refine the scheme 'nested'"):
        otaro.quantize(weight, "E5M4", scheme="truncate", polarity=True)
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


def test_refinements_belong_to_nested() -> None:
    assert (Format().polarity, Format().exponent_by_error) == (True, Precision.E5M5)
    assert (Format("nearest").polarity, Format("nearest").exponent_by_error) == (False, None)
    assert Format(exponent_by_error="none").exponent_by_error is None  # type: ignore[arg-type]
    assert Format(exponent_by_error="E5M4").exponent_by_error == Precision.E5M4  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="refine the scheme 'nested'"):
        Format("nearest", polarity=True)
