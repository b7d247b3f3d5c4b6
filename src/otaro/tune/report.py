"""What a run did to the model: perplexity at every width before and after, the widths over time, the loss per width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from otaro.console import ResultTable
from otaro.evaluate.perplexity import perplexity
from otaro.evaluate.report import perplexity_text
from otaro.evaluate.results import FULL, Width, width_name
from otaro.precision import Precision
from otaro.progress import Progress
from otaro.tune.callbacks import losses_by_width
from otaro.tune.trainer import OtaroTrainer

Perplexities = dict[str, float]
NAMES = [*map(str, Precision), FULL]
MARKED = 50
"""Points of a plot that are marked one by one, so that a run of a few updates, or of one, shows something."""


def measure(
    trainer: OtaroTrainer,
    tokens: Tensor,
    widths: Sequence[Width],
    window: int,
    progress: Progress | None = None,
    batch_size: int = 1,
) -> Perplexities:
    """Perplexity of the model as it is now, at each width; None is full precision.

    In the type of its weights, whatever it is trained in; but weights that FSDP casts when it gathers them stay cast.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    result = {}
    options: dict[str, Any] = {"window": window, "progress": progress, "batch_size": batch_size}
    # Other shapes than those that are trained with, in another type: compiling for them would not pay.
    with as_it_is(model), trainer.compilation.left_out():
        for width in widths:
            with trainer.at_width(width, exact=True):
                measured = perplexity(model, tokens, description=f"perplexity at {width_name(width)}", **options)
            result[width_name(width)] = measured.perplexity
    return result


@contextmanager
def as_it_is(model: nn.Module) -> Iterator[None]:
    """Without dropout and without mixed precision, which accelerate puts around `forward`.

    It keeps the one before in `_original_forward`, from which its own `unwrap_model` would restore it for good.
    """
    training, wrapped, original = model.training, model.forward, getattr(model, "_original_forward", None)
    model.eval()
    if original is not None:
        model.forward = original
    try:
        yield
    finally:
        if original is not None:
            model.forward = wrapped
        model.train(training)


def table(before: Perplexities, after: Perplexities, log: Sequence[dict[str, Any]]) -> ResultTable:
    """One row per width: perplexity before and after, how often it was taken, its last loss."""
    measured = bool(after)
    perplexities = ("perplexity before", "perplexity after") if measured else ()
    result = ResultTable("precision", *perplexities, "batches", "last loss")
    taken = losses_by_width(log)
    for name in (name for name in NAMES if name in after or name in taken):
        losses = [loss for _, loss in taken.get(name, ())]
        known = [values.get(name) for values in (before, after)] if measured else []
        figures = ["" if value is None else perplexity_text(value) for value in known]
        result.add_row(name, *figures, str(len(losses)), f"{losses[-1]:.3f}" if losses else "")
    return result


def finite(values: Perplexities) -> dict[str, float | None]:
    """For JSON, which has no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def write_plot(log: Sequence[dict[str, Any]], before: Perplexities, after: Perplexities, path: Path) -> bool:
    """Draw the widths over time, the loss per width and, where it was measured, perplexity before and after.

    False where matplotlib is not installed.
    """
    if find_spec("matplotlib") is None or not log:
        return False
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13, 6) if after else (9, 6), layout="constrained")
    rows = [["widths", "perplexity"], ["loss", "perplexity"]] if after else [["widths"], ["loss"]]
    axes: dict[str, Any] = figure.subplot_mosaic(rows, height_ratios=[1, 2.5], width_ratios=[2, 1] if after else [1])
    taken = losses_by_width(log)
    names = [name for name in reversed(NAMES) if name in taken]
    for row, name in enumerate(names):
        steps, values = zip(*taken[name], strict=True)
        color = f"C{NAMES.index(name)}"
        few = len(steps) <= MARKED
        axes["widths"].plot(steps, [row] * len(steps), "s" if few else "|", markersize=7, color=color)
        axes["loss"].plot(steps, values, marker="o" if few else None, linewidth=1, color=color, label=name)
    axes["widths"].set_yticks(range(len(names)), names)
    axes["widths"].set_ylim(-0.6, len(names) - 0.4)
    axes["loss"].legend(title="loss at", fontsize="small", title_fontsize="small", reverse=True)
    axes["loss"].set_xlabel("update")
    for name, title in (("widths", "width of each update"), ("loss", "loss")):
        axes[name].set_title(title, fontsize="medium")
        axes[name].set_xlim(log[0]["step"] - 0.5, log[-1]["step"] + 0.5)
        axes[name].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes[name].grid(alpha=0.3)
    if after:
        for label, measured, color in (("before", before, "0.6"), ("after", after, "black")):
            shown = {name: value for name, value in measured.items() if math.isfinite(value)}
            axes["perplexity"].plot([*shown], [*shown.values()], marker="o", color=color, label=label)
        axes["perplexity"].set_title("perplexity at each width", fontsize="medium")
        axes["perplexity"].grid(alpha=0.3)
        axes["perplexity"].legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return True
