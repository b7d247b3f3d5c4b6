"""Weights that are hard to get right, and every setting of the format, for the property tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from otaro import sefp
from otaro.precision import Precision
from otaro.sefp import Format

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COLUMNS = (1, 2, 3, 5, 7, 31, 32, 33, 63, 64, 65, 127, 129, 256, 576)
FORMATS = [Format(scheme, size) for size in sefp.GROUP_SIZES for scheme in sefp.SCHEMES]


def bits(tensor: Tensor) -> Tensor:
    """A tensor's raw bits, so that -0.0 is not 0.0."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


def kinds(columns: int, generator: torch.Generator) -> list[Tensor]:
    """Rows of float32, each of another nature."""

    def normal() -> Tensor:
        return torch.randn(columns, generator=generator)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (columns,), generator=generator).float()

    sign = whole(0, 2) * 2 - 1
    outlier = normal() * 2**-9
    outlier[columns // 2] = 1.5
    positive_outlier, negative_outlier = normal().abs(), -normal().abs()
    positive_outlier[-1], negative_outlier[0] = 7.9, -7.9
    tiny_in_huge = sign * whole(1, 9) * 2.0**-149  # products that underflow, beside a weight with exponent 15
    tiny_in_huge[columns // 3] = 40000.0
    raw = torch.randint(-(2**31), 2**31, (columns,), generator=generator).to(torch.int32).view(torch.float32)
    return [
        normal(),
        normal() * 2**-10,
        torch.zeros(columns),
        -torch.zeros(columns),
        torch.where(sign > 0, torch.zeros(columns), -torch.zeros(columns)),
        whole(-40, 40) * 2.0**-149,  # subnormal in float32
        whole(-40, 40) * 2.0**-24,  # subnormal in float16
        normal() * 2.0**-130,
        outlier,
        positive_outlier,
        negative_outlier,
        tiny_in_huge,
        sign * torch.exp2(whole(-16, -12)),  # exact powers at and below the least exponent
        sign * torch.exp2(whole(14, 18)),  # and at and above the greatest
        sign * torch.exp2(whole(-8, 8)),
        normal().clamp(-1.9, 1.9) * 2.0 ** float(whole(-16, 17)[0]),  # every exponent, beyond the clamps too
        sign * (2.0 - 2.0**-23) * torch.exp2(whole(-2, 2)),  # as large as an exponent allows
        (whole(-260, 260) + 0.5) * 2.0**-9,  # ties
        (whole(-16, 16) + 0.5) * 2.0**-3,
        whole(-512, 512) * 2.0**-8,  # exactly on a step
        torch.nan_to_num(raw, nan=1.0, posinf=3e38, neginf=-3e38),
    ]


def to_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in a dtype, kept finite."""
    limit = torch.finfo(dtype).max
    return weight.clamp(-limit, limit).to(dtype)


def hard_weight(columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return to_dtype(torch.stack(kinds(columns, torch.Generator().manual_seed(seed))), dtype)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Any shape the codec meets, rows of any mixture of natures."""
    columns = draw(st.sampled_from(COLUMNS))
    leading = draw(st.sampled_from([(), (1,), (2,), (9,), (17,), (2, 3), (3, 1)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    rows = kinds(columns, generator)
    count = torch.Size(leading).numel()
    chosen = torch.randint(len(rows), (count,), generator=generator).tolist()
    weight = to_dtype(torch.stack([rows[number] for number in chosen]), draw(st.sampled_from(DTYPES)))
    return weight.reshape(*leading, columns)


formats = st.sampled_from(FORMATS)
precisions = st.sampled_from(list(Precision))
