"""The settings of a tuning run, and the recipes: sets of settings under one name.

:class:`TuneArguments` are transformers' own training arguments with those of the method beside them, so everything the
Trainer can do (mixed precision, gradient accumulation and checkpointing, schedules, reporting) is set in one place.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from otaro.errors import OtaroError
from otaro.precision import EMBEDDING_FLOOR, Precision, parse_precisions
from otaro.sefp import Format
from otaro.tune.delay import APPLY
from otaro.tune.path import Path, make_path

MOST_TIERS = 2
"""What the GPU kernel knows."""
DEEPSPEED_REFUSED = (
    "DeepSpeed is not supported: its engine owns the optimizer, which must hold gradients back; "
    "use the accelerate configs for DDP or FSDP2 instead"
)


@dataclass
class TuneArguments(TrainingArguments):  # type: ignore[misc]
    """Everything a run is set by. Widths are written as text, ``all`` or ``E5M8,E5M4``, so that they parse and save."""

    method: str = field(
        default="otaro",
        metadata={"help": "otaro (BPS and LAA), bps, uniform, tiers, fixed:E5M8 … fixed:E5M3, or fp16."},
    )
    widths: str = field(default="all", metadata={"help": "The widths to tune for."})
    exploration: float = field(default=5.0, metadata={"help": "λ of BPS: how much neglected widths attract."})
    delay: int = field(default=10, metadata={"help": "N of LAA: ultra-low gradients that make one update."})
    delay_apply: str = field(default="sum", metadata={"help": "Apply held gradients as their sum or their mean."})
    ultra_low: str = field(default="E5M4,E5M3", metadata={"help": "The widths whose gradients are held."})
    tiers: str = field(default="E5M4,E5M3", metadata={"help": "The widths with weights of their own (tiers only)."})
    distillation: float = field(
        default=0.75,
        metadata={"help": "How much of a tier's loss is the divergence from a wide width (tiers only)."},
    )
    questions: bool = field(
        default=False,
        metadata={"help": "Also learn tokens without a label: questions; tiers from predictions alone."},
    )
    average: float = field(
        default=0.0, metadata={"help": "The share of the run, at its end, over which weights are averaged."}
    )
    scheme: str = field(default="nested", metadata={"help": "How weights are rounded: nested, nearest or truncate."})
    group_size: int = field(default=64, metadata={"help": "Weights that share a scale."})
    embedding_floor: str = field(
        default=str(EMBEDDING_FLOOR), metadata={"help": "Embeddings and output head never go below this width."}
    )
    learning_rate: float | None = field(
        default=None, metadata={"help": "Left out: what `default_learning_rate` gives for model and batch."}
    )
    # A loss that is not finite ends the run, so the Trainer need not look for one at every batch.
    logging_nan_inf_filter: bool = field(default=False)
    ddp_find_unused_parameters: bool | None = field(default=False)

    def __post_init__(self) -> None:
        if self.deepspeed is not None or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("true", "1"):
            raise OtaroError(DEEPSPEED_REFUSED)
        if self.delay < 1:
            raise OtaroError(f"a delay of {self.delay} batches holds nothing: choose 1 or more")
        if self.delay_apply not in APPLY:
            raise OtaroError(f"held gradients are applied as {' or '.join(APPLY)}, not as {self.delay_apply!r}")
        if len(parse_precisions(self.tiers)) > MOST_TIERS:
            raise OtaroError(f"{self.tiers} are too many tiers: choose at most {MOST_TIERS}")
        if not 0 <= self.distillation <= 1:
            raise OtaroError(f"a distillation of {self.distillation} is no share: choose from 0 to 1")
        if not 0 <= self.average <= 1:
            raise OtaroError(f"an average over {self.average} of the run is no share: choose from 0 to 1")
        if self.average and self.load_best_model_at_end:
            raise OtaroError("a run gives its best checkpoint or an average of its weights, not both: set average to 0")
        _ = self.path_widths, self.ultra_low_widths, self.tier_widths, self.format, self.floor
        self.make_path()
        try:
            super().__post_init__()
        except ValueError as error:
            raise OtaroError(str(error)) from error

    @property
    def path_widths(self) -> list[Precision]:
        return parse_precisions(self.widths)

    @property
    def ultra_low_widths(self) -> list[Precision]:
        return parse_precisions(self.ultra_low) if self.ultra_low else []

    @property
    def tier_widths(self) -> list[Precision]:
        """Of the widths to tune for those with weights of their own, the narrowest first; never the widest."""
        wanted = self.path_widths
        return sorted(width for width in parse_precisions(self.tiers) if width in wanted and width < max(wanted))

    @property
    def format(self) -> Format:
        return Format(self.scheme, self.group_size)  # type: ignore[arg-type]

    @property
    def floor(self) -> Precision:
        return Precision(self.embedding_floor)

    @property
    def n_gpu(self) -> int:
        """One at most: DataParallel, the Trainer's way for more, makes copies of the layers that no width is set on."""
        return min(1, super().n_gpu)

    @property
    def idle_gpus(self) -> int:
        """How many more there are than this process uses."""
        return super().n_gpu - self.n_gpu

    def make_path(self) -> Path:
        return make_path(
            self.method, self.path_widths, exploration=self.exploration, seed=self.seed, tiers=self.tier_widths
        )


RESUMED = (
    "method",
    "widths",
    "exploration",
    "delay",
    "delay_apply",
    "ultra_low",
    "tiers",
    "distillation",
    "questions",
    "average",
    "scheme",
    "group_size",
    "embedding_floor",
    "optim",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "max_steps",
    "num_train_epochs",
    "seed",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
)
"""The settings that a resumed run must share with the one it goes on from, else it would be a run of neither."""

RECIPES: dict[str, dict[str, Any]] = {
    # The paper's settings. Its figures before tuning rule out plain truncation: `nearest` is what matches them.
    "paper": {
        "optim": "sgd",
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "method": "otaro",
        "exploration": 5.0,
        "delay": 10,
        "delay_apply": "sum",
        "scheme": "nearest",
        "group_size": 64,
    },
    # What held up best (docs/tuning.md, docs/results.md). The learning rate depends on model and batch: see
    # `default_learning_rate`.
    "default": {
        "optim": "adamw_torch",
        "lr_scheduler_type": "cosine",
        "average": 0.4,
        "questions": True,
        "warmup_steps": 0.03,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "method": "tiers",
        "exploration": 5.0,
        "delay": 10,
        "delay_apply": "sum",
        "scheme": "nested",
        "group_size": 64,
    },
}


REFERENCE_RATE, REFERENCE_SIZE, REFERENCE_TOKENS = 3e-4, 576, 8192
"""The learning rate that was chosen by trial, for a model of that hidden size and updates of so many tokens."""


def default_learning_rate(hidden_size: int | None, tokens: float | None) -> float:
    """The learning rate of a run that none was given for.

    Wider layers take smaller steps, in proportion; `hidden_size` is None for adapters, which are not scaled. Updates of
    fewer `tokens`, over all micro-batches and processes, have noisier gradients, by the square root, and steps smaller
    by as much. Larger updates, and those whose tokens are not known, take the rate of the reference.
    """
    size = 1.0 if hidden_size is None else REFERENCE_SIZE / hidden_size
    noise = 1.0 if tokens is None else min(1.0, tokens / REFERENCE_TOKENS) ** 0.5
    return REFERENCE_RATE * size * noise


def recipe(name: str) -> dict[str, Any]:
    """The settings of a recipe, to be changed freely."""
    if name not in RECIPES:
        raise OtaroError(f"unknown recipe {name!r}: choose {' or '.join(RECIPES)}")
    return dict(RECIPES[name])
