"""Tables and plots of tuning runs: perplexity at every width, a row or a line for each run, means over seeds.

A result is what a script writes as JSON: under `runs` a list of rows for each run by name, a row to a seed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from otaro.precision import Precision

WIDTHS = [str(precision) for precision in Precision]
NAMES = [*WIDTHS, "full"]
PANELS = (WIDTHS[:4], WIDTHS[4:])
"""Widths that are drawn together: perplexity at E5M4 and E5M3 has another scale."""

Row = dict[str, tuple[float, float | None]]
"""Mean and standard deviation by width; no deviation where there is one seed."""


def together(files: Sequence[str]) -> dict[str, Any]:
    """The runs of several results; of two with the same name and seed the one that is named first."""
    results = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    runs: dict[str, dict[Any, Any]] = {}
    for result in results:
        for name, rows in result["runs"].items():
            for row in rows:
                runs.setdefault(name, {}).setdefault(row.get("seed"), row)
    return {**results[0], "runs": {name: list(rows.values()) for name, rows in runs.items()}}


def means(result: dict[str, Any]) -> dict[str, Row]:
    table = {}
    for name, rows in result["runs"].items():
        values = {width: [row["perplexity"][width] for row in rows] for width in NAMES}
        table[name] = {
            width: (statistics.mean(found), statistics.stdev(found) if len(found) > 1 else None)
            for width, found in values.items()
        }
    return table


def show(result: dict[str, Any], **columns: dict[str, str]) -> None:
    """Print the table; each of `columns` has a cell for some of the runs."""
    print(f"\n| run | {' | '.join([*(name.removeprefix('E5') for name in NAMES), *columns])} |".replace("_", " "))
    print("|---" * (1 + len(NAMES) + len(columns)) + "|")
    for name, row in means(result).items():
        cells = [f"{mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}") for mean, spread in row.values()]
        more = [column.get(name, "") for column in columns.values()]
        print(f"| {' | '.join([name, *cells, *more])} |")


def draw(result: dict[str, Any], path: Path, title: str, without: Iterable[str] = ()) -> None:
    """A line for each run but those `without`; runs of one width, far off at others, make one line together."""
    from matplotlib.figure import Figure

    lines = {name: row for name, row in means(result).items() if name not in without}
    own = {width: lines.pop(f"fixed:{width}")[width] for width in WIDTHS if f"fixed:{width}" in lines}
    if own:
        lines["fixed, each run at its width"] = own
    figure = Figure(figsize=(12, 5), layout="constrained")
    handles = {}
    for axes, panel in zip(figure.subplots(1, 2, width_ratios=(4, 3)), PANELS, strict=True):
        for number, (name, row) in enumerate(lines.items()):
            found = [(WIDTHS.index(width), *row[width]) for width in panel if width in row]
            if not found:
                continue
            places, values, spreads = zip(*found, strict=True)
            handles[name] = axes.errorbar(
                places,
                values,
                None if None in spreads else spreads,
                marker="o",
                capsize=3,
                color=f"C{number % 10}",
                linestyle="-" if number < 10 else "--",
            )
        axes.set(xlabel="precision", ylabel="perplexity")
        axes.set_xticks([WIDTHS.index(width) for width in panel], panel)
        axes.grid(alpha=0.3)
    figure.legend(handles.values(), handles.keys(), fontsize=8, loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
