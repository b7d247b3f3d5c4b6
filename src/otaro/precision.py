"""The widths a weight can take: E5M8, the widest, down to E5M3."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable

from otaro.errors import PrecisionError


@functools.total_ordering
class Precision(enum.Enum):
    """A width of the format: a 5-bit exponent shared by a group, `mantissa` bits and a sign for each weight.

    ``Precision("E5M4")`` parses a name, comparison goes by width, and iterating lists all of them, the widest first.
    """

    E5M8 = "E5M8"
    E5M7 = "E5M7"
    E5M6 = "E5M6"
    E5M5 = "E5M5"
    E5M4 = "E5M4"
    E5M3 = "E5M3"

    @property
    def mantissa(self) -> int:
        """Mantissa bits of one weight, the sign not counted."""
        return int(self.value[-1])

    @classmethod
    def from_mantissa(cls, bits: int) -> Precision:
        return cls(f"E5M{bits}")

    @classmethod
    def _missing_(cls, value: object) -> Precision:
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise PrecisionError(f"unknown precision {value!r}: choose one of {join(cls)}")

    def __lt__(self, other: Precision) -> bool:
        if not isinstance(other, Precision):
            return NotImplemented
        return self.mantissa < other.mantissa

    def __str__(self) -> str:
        return str(self.value)


WIDEST = Precision.E5M8
NARROWEST = Precision.E5M3
EMBEDDING_FLOOR = Precision.E5M4
"""The default floor of embeddings and output head, which suffer first: a width they never go below."""


def join(precisions: Iterable[Precision]) -> str:
    """The names in one line, for messages and tables."""
    return ", ".join(str(precision) for precision in precisions)


def parse_precisions(text: str, available: Iterable[Precision] = Precision) -> list[Precision]:
    """Read ``all`` or a comma-separated list of names; the order given is kept, each must be in `available`."""
    available = list(available)
    if text.strip().lower() == "all":
        return available
    chosen = [Precision(name.strip()) for name in text.split(",")]
    for precision in chosen:
        if precision not in available:
            raise PrecisionError(f"precision {precision} is not available here: choose from {join(available)}")
    return chosen
