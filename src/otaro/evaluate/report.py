"""What each width costs and gives: as tables, and written to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from otaro.console import ResultTable, size_text
from otaro.evaluate.documents import TASKS
from otaro.evaluate.results import Evaluation, width_name
from otaro.precision import Precision


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
            *([] if before is None else [perplexity_text(before[row.precision])]),
            perplexity_text(row.perplexity),
            f"{row.tokens_per_second:.1f}",
        )
    return result


def perplexity_text(perplexity: float) -> str:
    return f"{perplexity:.3f}" if perplexity < 1e5 else f"{perplexity:.3g}"


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
            row.append(perplexity_text(text.perplexity))
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
