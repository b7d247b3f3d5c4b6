"""What each width costs and gives: as tables, and written to files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from otaro.console import ResultTable, size_text
from otaro.errors import OtaroError
from otaro.evaluate.documents import TASKS
from otaro.evaluate.results import Evaluation, width_name
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


def table(rows: Sequence[Row], *, before: Mapping[Precision, float] | None = None) -> ResultTable:
    """The rows for a terminal; `before` adds an earlier perplexity."""
    earlier = [] if before is None else ["perplexity before"]
    result = ResultTable("precision", "bits per weight", "size", *earlier, "perplexity", "tokens/s")
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
    write_atomically(path, lambda part: part.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8"))


def width_tables(evaluation: Evaluation) -> list[ResultTable]:
    """For a terminal: what each width costs and how it predicts a text, and the accuracy on each task."""
    return [_cost_table(evaluation), *([_accuracy_table(evaluation)] if evaluation.tasks else [])]


def _cost_table(evaluation: Evaluation) -> ResultTable:
    subject = evaluation.subject
    compared, timed = evaluation.compared, subject.packed
    headings = ["precision", "bits per weight", "size"]
    if evaluation.text:
        headings += ["perplexity", *(["KL divergence", "same token, %"] if compared else [])]
        headings += ["tokens/s (prefill)"] if timed else []
    result = ResultTable(*headings)
    for width in subject.widths:
        cost = subject.costs.get(width)
        row = [width_name(width)]
        row += ["", ""] if cost is None else [f"{cost.bits_per_weight:.2f}", size_text(cost.size)]
        if evaluation.text:
            text = evaluation.text[width]
            row.append(_perplexity_text(text.perplexity))
            if compared:
                alone = width == subject.reference
                row += ["", ""] if alone else [f"{text.divergence:.4g}", percent(text.same_token)]
            row += [f"{text.tokens_per_second:.1f}"] if timed else []
        result.add_row(*row)
    return result


def _accuracy_table(evaluation: Evaluation) -> ResultTable:
    subject = evaluation.subject
    result = ResultTable("accuracy, %", *map(width_name, subject.widths))
    for task, figures in evaluation.tasks.items():
        result.add_row(TASKS[task].title, *(accuracy_text(figures[width].metrics, "acc") for width in subject.widths))
    result.add_section()
    averages = [evaluation.average(width) for width in subject.widths]
    result.add_row("average", *(accuracy_text(figures, "acc") for figures in averages))
    result.add_row("average of acc_norm", *(accuracy_text(figures, "acc_norm") for figures in averages))
    if evaluation.compared:
        result.add_row(
            f"answers as {width_name(subject.reference)}",
            *(
                "" if width == subject.reference else percent(figures["agreement"])
                for width, figures in zip(subject.widths, averages, strict=True)
            ),
        )
    return result


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def accuracy_text(figures: Mapping[str, float | None], metric: str) -> str:
    """A metric in per cent with its standard error, or nothing where lm-eval does not have it."""
    if metric not in figures:
        return ""
    error = figures[f"{metric}_stderr"]
    return percent(figures[metric]) + ("" if error is None else f" ±{percent(error)}")


def check_plot(path: Path) -> None:
    """Refuse a plot that could not be drawn, before hours are spent on its figures."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise OtaroError(f"{path} cannot be drawn: name a file that ends in {', '.join(PLOT_SUFFIXES)}")
    check_matplotlib()


def check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise OtaroError("plots need matplotlib: install it with pip install 'otaro-llm[plot]'")


def write_plot(evaluation: Evaluation, path: Path) -> None:
    """All plots of an evaluation side by side in one file."""
    from otaro.evaluate.plots import draw

    save_figure(draw(evaluation), path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a plot of matplotlib in the format that the file's name asks for."""
    write_atomically(path, lambda part: figure.savefig(part, dpi=150, format=path.suffix[1:].lower()))


def write_page(evaluation: Evaluation, path: Path) -> None:
    """The whole evaluation as one HTML file that needs no other."""
    from otaro.evaluate.page import render

    text = render(evaluation)
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file whose name another takes over once it is whole."""
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
