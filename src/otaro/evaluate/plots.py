"""The plots of an evaluation: each over bits per weight, full precision as a dashed line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from otaro.evaluate.documents import TASKS
from otaro.evaluate.results import Evaluation
from otaro.precision import Precision

PANEL = (6.4, 4.2)
"""Inches."""
MARGIN = 0.25
"""Bits per weight between the outermost widths and the frame."""


def draw(evaluation: Evaluation) -> Figure:
    """All panels in one figure, two to a row."""
    panels = _panels(evaluation)
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, axes in zip(panels, grid, strict=False):
        panel.draw(axes)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(evaluation.subject.label)
    return figure


def draw_each(evaluation: Evaluation) -> list[tuple[str, Figure]]:
    """Each panel by itself, with its title."""
    drawn = []
    for panel in _panels(evaluation):
        figure = Figure(figsize=PANEL, layout="constrained")
        panel.draw(figure.subplots())
        drawn.append((panel.title, figure))
    return drawn


class _Panel:
    """One plot: `lines` of (name, values by width, errors by width or None)."""

    def __init__(self, evaluation: Evaluation, title: str, unit: str, *, logarithmic: bool = False) -> None:
        self.title = title
        self._unit = unit
        self._logarithmic = logarithmic
        self._costs = evaluation.subject.costs
        self._widths = sorted((w for w in evaluation.subject.widths if w is not None), reverse=True)
        self._lines: list[tuple[str, dict[Any, float], dict[Any, float] | None]] = []

    def add(self, name: str, values: dict[Any, float], errors: dict[Any, float] | None = None) -> None:
        self._lines.append((name, values, errors))

    def draw(self, axes: Any) -> None:
        for number, (name, values, errors) in enumerate(self._lines):
            color = f"C{number}"
            shown = [width for width in self._widths if width in values and math.isfinite(values[width])]
            axes.errorbar(
                [self._costs[width].bits_per_weight for width in shown],
                [values[width] for width in shown],
                None if errors is None else [errors[width] for width in shown],
                marker="o",
                capsize=3,
                color=color,
                label=name,
            )
            if None in values:
                axes.axhline(values[None], linestyle="--", linewidth=1, color=color, alpha=0.6)
        if len(self._lines) > 1:
            # Beside the axes, where no line can run under it.
            axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
        label_widths(axes, {width: self._costs[width].bits_per_weight for width in self._widths})
        axes.set_ylabel(self._unit)
        axes.set_title(self.title)
        if self._logarithmic:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)


def label_widths(axes: Any, bits_per_weight: Mapping[Precision, float]) -> None:
    """Name the widths under an axis of bits per weight, where no line runs."""
    places = list(bits_per_weight.values())
    axes.set_xticks(places, [f"{width}\n{bits:.2f}" for width, bits in bits_per_weight.items()])
    axes.set_xlim(min(places) - MARGIN, max(places) + MARGIN)
    axes.set_xlabel("bits per weight")


def _panels(evaluation: Evaluation) -> list[_Panel]:
    panels = []
    reference = "full precision" if evaluation.subject.reference is None else str(evaluation.subject.reference)
    compared = {width for width in evaluation.subject.widths if width != evaluation.subject.reference}
    if evaluation.text:
        panel = _Panel(evaluation, "Perplexity", "perplexity (lower is better)")
        panel.add("perplexity", {width: text.perplexity for width, text in evaluation.text.items()})
        panels.append(panel)
        if compared:
            panel = _Panel(evaluation, f"KL divergence from {reference}", "nats per token", logarithmic=True)
            panel.add("divergence", {width: evaluation.text[width].divergence for width in compared})
            panels.append(panel)
    if evaluation.tasks:
        panel = _Panel(evaluation, f"Average accuracy, {_count(evaluation)}", "% (higher is better)")
        for metric in ("acc", "acc_norm"):
            averages = {width: evaluation.average(width) for width in evaluation.subject.widths}
            panel.add(metric, *_percent(averages, metric))
        panels.append(panel)
        panel = _Panel(evaluation, "Accuracy of each task", "% (higher is better)")
        for task, figures in evaluation.tasks.items():
            panel.add(TASKS[task].title, *_percent({width: figures[width].metrics for width in figures}, "acc"))
        panels.append(panel)
        if compared:
            panel = _Panel(evaluation, f"Same answers as {reference}", "%")
            for task in evaluation.tasks:
                panel.add(TASKS[task].title, {width: 100 * evaluation.agreement(task, width) for width in compared})
            panels.append(panel)
    return panels


def _count(evaluation: Evaluation) -> str:
    count = len(evaluation.tasks)
    return "1 task" if count == 1 else f"{count} tasks"


def _percent(figures: dict[Any, dict[str, Any]], metric: str) -> tuple[dict[Any, float], dict[Any, float]]:
    """A metric and its standard error, for every width; an error that is not known is drawn as none."""
    values = {width: 100 * found[metric] for width, found in figures.items()}
    return values, {width: 100 * (found[f"{metric}_stderr"] or 0.0) for width, found in figures.items()}
