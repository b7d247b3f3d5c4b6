"""What each width costs and gives: as a table, as JSON and as a plot."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from otaro.console import size_text
from otaro.errors import OtaroError
from otaro.precision import Precision

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Row:
    """One width: what it reads from disk, how well it predicts, how fast it runs."""

    precision: Precision
    bits_per_weight: float
    size: int
    perplexity: float
    tokens_per_second: float

    def to_json(self) -> dict[str, Any]:
        return {
            "precision": str(self.precision),
            "bits_per_weight": self.bits_per_weight,
            "size_bytes": self.size,
            # JSON has no infinity; a perplexity that overflows is reported as null.
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "tokens_per_second": self.tokens_per_second,
        }


def table(
    rows: Sequence[Row],
    *,
    title: str | None = None,
    speed: str = "tokens/s",
    before: Mapping[Precision, float] | None = None,
) -> Table:
    """The rows for a terminal; `speed` names what the last column measured, `before` adds an earlier perplexity."""
    result = Table(title=title, title_justify="left")
    result.add_column("precision")
    earlier = [] if before is None else ["perplexity before"]
    for name in ("bits per weight", "size", *earlier, "perplexity", speed):
        result.add_column(name, justify="right")
    for row in rows:
        result.add_row(
            str(row.precision),
            f"{row.bits_per_weight:.2f}",
            size_text(row.size),
            *([] if before is None else [_perplexity_text(before[row.precision])]),
            _perplexity_text(row.perplexity),
            f"{row.tokens_per_second:.1f}",
        )
    return result


def _perplexity_text(perplexity: float) -> str:
    return f"{perplexity:.3f}" if perplexity < 1e5 else f"{perplexity:.3g}"


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write a report so that a reader sees the old file or the new one, never half of it."""
    _write_atomically(path, lambda part: part.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8"))


def check_plot(path: Path) -> None:
    """Refuse a plot that could not be drawn, before hours are spent on its figures."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise OtaroError(f"{path} cannot be drawn: name a file that ends in {', '.join(PLOT_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise OtaroError("plots need matplotlib: install it with pip install 'otaro-llm[plot]'")


def write_plot(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Perplexity against bits per weight, one point for each width."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    drawn = sorted((row for row in rows if math.isfinite(row.perplexity)), key=lambda row: row.bits_per_weight)
    axes.plot([row.bits_per_weight for row in drawn], [row.perplexity for row in drawn], marker="o")
    for row in drawn:
        axes.annotate(
            f"{row.precision}\n{row.perplexity:.2f}",
            (row.bits_per_weight, row.perplexity),
            xytext=(6, 6),
            textcoords="offset points",
        )
    axes.set_xlabel("bits per weight")
    axes.set_ylabel("perplexity")
    axes.set_title(title)
    axes.margins(x=0.1, y=0.15)
    axes.grid(alpha=0.3)
    _write_atomically(path, lambda part: figure.savefig(part, dpi=150, format=path.suffix[1:].lower()))


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    part = Path(name)
    try:
        write(part)
        # mkstemp makes a file only its owner may read; give it what open() would have given.
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
