"""The figures of an evaluation: what was measured at each width, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from otaro.precision import Precision

if TYPE_CHECKING:
    from otaro.evaluate.model import Subject

Width = Precision | None
"""None is full precision: the weights as they are."""

FULL = "full"


def width_name(width: Width) -> str:
    return FULL if width is None else str(width)


@dataclass(frozen=True)
class TextFigures:
    """A text at one width. `divergence` is the mean KL divergence in nats of the distributions of the next token from
    the reference's, `same_token` the share of positions where both find the same token likeliest.
    """

    perplexity: float
    cross_entropy: float
    divergence: float
    same_token: float
    tokens_per_second: float


@dataclass(frozen=True)
class TaskFigures:
    """A task at one width: lm-eval's metrics, and the answer chosen for each document (the likeliest)."""

    metrics: dict[str, float | None]
    chosen: list[int]

    def agreement(self, other: TaskFigures) -> float:
        """The share of documents where both choose the same answer."""
        return sum(map(int.__eq__, self.chosen, other.chosen)) / len(self.chosen)


@dataclass
class Evaluation:
    """Everything measured of a model; `text` and `tasks` hold the widths, `tasks` task by task."""

    subject: Subject
    about: dict[str, Any]
    """The settings, for the record: the text, the window, where tasks came from."""
    text: dict[Width, TextFigures] = field(default_factory=dict)
    tasks: dict[str, dict[Width, TaskFigures]] = field(default_factory=dict)

    @property
    def compared(self) -> bool:
        """Whether there is anything to compare with the reference."""
        return len(self.subject.widths) > 1

    def agreement(self, task: str, width: Width) -> float:
        """The share of documents where the width chooses as the reference does."""
        return self.tasks[task][width].agreement(self.tasks[task][self.subject.reference])

    def average(self, width: Width) -> dict[str, float | None]:
        """The means over tasks at a width, agreement included."""
        figures = average([figures[width].metrics for figures in self.tasks.values()])
        if self.compared:
            figures["agreement"] = sum(self.agreement(task, width) for task in self.tasks) / len(self.tasks)
        return figures

    def to_json(self) -> dict[str, Any]:
        subject = self.subject
        return {
            "model": subject.label,
            "architecture": subject.architecture,
            "packed": subject.packed,
            "format": subject.layout.to_json(),
            "backend": subject.backend.name,
            "dtype": subject.backend.dtype,
            "device": subject.backend.device,
            "reference": width_name(subject.reference) if self.compared else None,
            **self.about,
            "results": [self._width_json(width) for width in subject.widths],
        }

    def _width_json(self, width: Width) -> dict[str, Any]:
        cost = self.subject.costs.get(width)
        row: dict[str, Any] = {
            "precision": width_name(width),
            "bits_per_weight": None if cost is None else cost.bits_per_weight,
            "size_bytes": None if cost is None else cost.size,
        }
        if self.text:
            text = self.text[width]
            row["perplexity"] = _finite(text.perplexity)
            row["cross_entropy"] = _finite(text.cross_entropy)
            if self.compared:
                row |= {"kl_divergence": _finite(text.divergence), "same_token": text.same_token}
            if self.subject.packed:  # a simulated width says nothing about speed
                row["tokens_per_second"] = text.tokens_per_second
        if self.tasks:
            row["tasks"] = {
                task: {
                    **figures[width].metrics,
                    **({"agreement": self.agreement(task, width)} if self.compared else {}),
                    "documents": len(figures[width].chosen),
                }
                for task, figures in self.tasks.items()
            }
            row["average"] = self.average(width)
        return row


def _finite(value: float) -> float | None:
    """JSON has no infinity; a figure that overflows is reported as null."""
    return value if math.isfinite(value) else None


def average(figures: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The means over tasks of acc, and of acc_norm where lm-eval has it (acc where not), with standard errors."""
    result: dict[str, float | None] = {}
    for metric in ("acc", "acc_norm"):
        names = [metric if metric in task else "acc" for task in figures]
        result[metric] = sum(task[name] for name, task in zip(names, figures, strict=True)) / len(figures)
        errors = [task[f"{name}_stderr"] for name, task in zip(names, figures, strict=True)]
        known = None not in errors
        result[f"{metric}_stderr"] = math.sqrt(sum(error**2 for error in errors)) / len(figures) if known else None
    return result
