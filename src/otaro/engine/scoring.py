"""How likely a text is, token by token, with activations of 16 bits in every product, as `otaro eval` measures it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy

from otaro.engine.engine import Engine
from otaro.engine.native import Logits
from otaro.engine.numbers import token_ids
from otaro.precision import Precision

Score = tuple[float, tuple[tuple[int, float], ...]]
"""The log probability of a token, and the likeliest tokens in its place with theirs."""


def scores(
    engine: Engine,
    tokens: Sequence[int],
    precision: Precision | None = None,
    *,
    top: int = 0,
    ended: Callable[[], bool] = lambda: False,
) -> list[Score] | None:
    """The scores of every token of a text but the first, with the `top` likeliest in its place; None once `ended`."""
    ids = token_ids(tokens)
    engine.check_prompt(ids, 0)
    engine.check_widths(precision, None)
    work, session = engine.for_scoring(len(ids))
    found: list[Score] = []
    for first in range(0, len(ids) - 1, work.scored_tokens):
        if ended():
            return None
        part = ids[first : min(first + work.scored_tokens, len(ids) - 1)]
        with engine.running:
            _, widths = engine.widths_now(precision)
            rows = work.logits(session, part, first, widths, threads=engine.threads, rows=len(part))
        found += (score(row, ids[first + place + 1], top) for place, row in enumerate(rows))
    return found


def score(logits: Logits, token: int, top: int) -> Score:
    values = logits.astype(numpy.float64)
    values -= values.max()
    values -= math.log(numpy.exp(values).sum())
    best = numpy.argpartition(-values, min(top, len(values) - 1))[:top]
    best = best[numpy.argsort(-values[best], kind="stable")]
    return float(values[token]), tuple((int(id), float(values[id])) for id in best)
