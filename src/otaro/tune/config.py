"""The settings of a tuning run; sets of them under one name are recipes (`otaro.tune.recipe`).

:class:`TuneArguments` are transformers' own training arguments with those of the method beside them, so everything the
Trainer can do (mixed precision, gradient accumulation and checkpointing, schedules, reporting) is set in one place.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from otaro.errors import OtaroError
from otaro.precision import EMBEDDING_FLOOR, Precision, parse_precisions
from otaro.sefp import Format
from otaro.tune.delay import APPLY
from otaro.tune.recipe import SETTINGS, Recipe, find_recipe
from otaro.tune.selector import WidthSelector, make_selector

MOST_TIERS = 2
"""What the GPU kernel knows."""


def setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


DEEPSPEED_REFUSED = (
    "DeepSpeed is not supported: its engine owns the optimizer, which must hold gradients back; "
    "use the accelerate configs for DDP or FSDP2 instead"
)


@dataclass
class TuneArguments(TrainingArguments):  # type: ignore[misc]
    """Everything a run is set by. Widths are written as text, ``all`` or ``E5M8,E5M4``, so that they parse and save."""

    recipe: str = setting("default", "Where the constants come from that are no settings: default or paper.")
    method: str = setting("otaro", "otaro (BPS and LAA), bps, uniform, tiers, fixed:E5M8 … fixed:E5M3, or fp16.")
    widths: str = setting("all", "The widths to tune for.")
    exploration: float = setting(5.0, "λ of BPS: how much neglected widths attract.")
    delay: int = setting(10, "N of LAA: ultra-low gradients that make one update.")
    delay_apply: str = setting("sum", "Apply held gradients as their sum or their mean.")
    ultra_low: str = setting("E5M4,E5M3", "The widths that LAA holds gradients back at, or that have tiers.")
    completion_only: bool = setting(True, "Learn tokens with a label only; else prompts too.")
    average: float = setting(0.0, "The share of the run, at its end, over which weights are averaged.")
    held_back: float = setting(0.0, "The share of repeated data that is measured on, not learned (tiers only).")
    fit_only: bool = setting(False, "Tune nothing; all updates fit tiers to the weights as they are (tiers only).")
    compile: bool | None = setting(None, "Compile layers and losses, which pays on a GPU; left out: there only.")
    compile_backend: str = setting("inductor", "What torch.compile compiles with.")
    scheme: str = setting("nested", "How weights are rounded: nested, nearest or truncate.")
    group_size: int = setting(64, "Weights that share a scale.")
    embedding_floor: str = setting(str(EMBEDDING_FLOOR), "Embeddings and output head never go below this width.")
    learning_rate: float | None = setting(None, "Left out: the recipe's, for model and batch.")
    # A loss that is not finite ends the run, so the Trainer need not look for one at every batch.
    logging_nan_inf_filter: bool = False
    ddp_find_unused_parameters: bool | None = False

    def __post_init__(self) -> None:
        if self.deepspeed is not None or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("true", "1"):
            raise OtaroError(DEEPSPEED_REFUSED)
        named = {"learning rate": self.learning_rate, "number of epochs": self.num_train_epochs, "λ": self.exploration}
        for name, value in named.items():
            if value is not None and not math.isfinite(value):
                raise OtaroError(f"the {name} {value} is no number to tune with: choose another")
        if not 0 <= self.seed < 2**32:
            raise OtaroError(f"the seed {self.seed} is no number from 0 to {2**32 - 1}: choose another")
        if self.delay < 1:
            raise OtaroError(f"a delay of {self.delay} batches holds nothing: choose 1 or more")
        if self.delay_apply not in APPLY:
            raise OtaroError(f"held gradients are applied as {' or '.join(APPLY)}, not as {self.delay_apply!r}")
        if self.method == "tiers" and not self.ultra_low_widths:
            raise OtaroError("the method tiers fits ultra-low widths: name some, or choose the method fp16")
        if self.method == "tiers" and len(self.ultra_low_widths) > MOST_TIERS:
            raise OtaroError(f"{self.ultra_low} are too many tiers: choose at most {MOST_TIERS}")
        if not 0 <= self.average <= 1:
            raise OtaroError(f"an average over {self.average} of the run is no share: choose from 0 to 1")
        if not 0 <= self.held_back < 1:
            raise OtaroError(f"{self.held_back} of the data is no share to hold back: choose less than 1")
        if self.average and self.load_best_model_at_end:
            raise OtaroError("a run gives its best checkpoint or an average of its weights, not both: set average to 0")
        if self.fit_only and (self.method != "tiers" or not self.tier_widths):
            raise OtaroError(
                f"the method {self.method} for {self.widths} has no tiers that could be fitted: choose the method "
                f"tiers, and {' or '.join(map(str, self.ultra_low_widths)) or 'ultra-low ones'} among the widths"
            )
        if self.fit_only and self.average:
            raise OtaroError("nothing is averaged where tiers are only fitted: set average to 0")
        if self.fit_only and self.load_best_model_at_end:
            raise OtaroError("a run that only fits has one result, not a best one: leave early stopping out")
        _ = self.tuned_widths, self.ultra_low_widths, self.tier_widths, self.format, self.floor
        self.make_selector()
        try:
            super().__post_init__()
        except ValueError as error:
            raise OtaroError(str(error)) from error

    @property
    def tuned_widths(self) -> list[Precision]:
        return parse_precisions(self.widths)

    @property
    def ultra_low_widths(self) -> list[Precision]:
        return parse_precisions(self.ultra_low) if self.ultra_low else []

    @property
    def tier_widths(self) -> list[Precision]:
        """Of the widths to tune for those with weights of their own, the narrowest first."""
        return sorted({*self.ultra_low_widths} & {*self.tuned_widths})

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

    @property
    def constants(self) -> Recipe:
        """What is no setting."""
        return find_recipe(self.recipe)

    def make_selector(self) -> WidthSelector:
        return make_selector(self.method, self.tuned_widths, exploration=self.exploration, seed=self.seed)


RESUMED = (
    *("recipe", *SETTINGS, "lr_scheduler_kwargs", "max_steps", "num_train_epochs", "seed"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "fit_only"),
)
"""The settings that a resumed run must share with the one it goes on from, else it would be a run of neither."""
