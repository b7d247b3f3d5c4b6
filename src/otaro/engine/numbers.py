"""Numbers that a caller gives: of the right kind and within bounds, or one sentence."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any

from otaro.errors import OtaroError

MOST_THREADS, MOST_CONTEXT = 1024, 2**31
"""As the native library has them."""


def whole(name: str, value: Any, least: int, most: int) -> int:
    """A whole number of any integer type, numpy's included, from `least` to `most`; a bool is none."""
    number = _index(value)
    if number is None or not least <= number <= most:
        raise OtaroError(f"{name} is {shown(value)}: it must be a whole number from {least} to {most}")
    return number


def is_finite(value: Any) -> bool:
    """Whether a value is a number at all, and neither infinite nor NaN."""
    try:
        return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def token_ids(tokens: Any) -> list[int]:
    """The ids of tokens as plain integers."""
    if isinstance(tokens, str | bytes | bytearray):
        raise OtaroError("tokens are numbers and this is text: use generate for a text, chat for messages")
    if not isinstance(tokens, Iterable):
        raise OtaroError(f"tokens are a sequence of whole numbers, not {shown(tokens)}")
    ids = []
    for token in tokens:
        number = _index(token)
        if number is None:
            raise OtaroError(f"a token is a whole number, not {shown(token)}: give the ids of one text")
        ids.append(number)
    return ids


def shown(value: Any) -> str:
    """A value as it may stand in a sentence, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, or a class of the caller's
        return f"of type {type(value).__name__} and cannot be shown"
    return text if len(text) <= 60 else f"{text[:50]}…"


def _index(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except Exception:  # not an integer, or a tensor of several
        return None
