"""Recipes: everything a run is decided by besides the model, the data and how long it goes on.

A :class:`Recipe` holds every constant of a method. Those that a user may want to change are settings of
:class:`otaro.tune.config.TuneArguments` too, and what is set there counts; the others are taken from the recipe that
the arguments name. Command, Python and demo all get their settings from :func:`settings`. docs/method.md says what each
constant is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from otaro.errors import OtaroError
from otaro.precision import EMBEDDING_FLOOR

# Settings of `TuneArguments` that a recipe decides; its other fields are constants.
SETTINGS = (
    *("optim", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm"),
    *("method", "widths", "exploration", "delay", "delay_apply", "ultra_low"),
    *("completion_only", "average", "held_back", "scheme", "group_size", "embedding_floor"),
)


@dataclass(frozen=True)
class Recipe:
    """Shares are of 1, those of a run are of its updates; widths are named as on the command line."""

    # The optimizer.
    optim: str = "adamw_torch"
    learning_rate: float | None = None  # by `learning_rate_for` where there is none
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.03
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    reference_rate: float = 3e-4  # of a model of the reference's hidden size with updates of so many tokens
    reference_hidden_size: int = 576
    reference_tokens: int = 8192

    # The widths, and how their values are made.
    method: str = "tiers"
    widths: str = "all"
    scheme: str = "nested"
    group_size: int = 64
    embedding_floor: str = str(EMBEDDING_FLOOR)

    # BPS and LAA.
    exploration: float = 5.0
    delay: int = 10
    delay_apply: str = "sum"
    ultra_low: str = "E5M4,E5M3"  # LAA holds their gradients back, the method tiers gives them weights of their own

    # The method tiers.
    fitting: float = 1 / 3  # the updates that fit tiers after the run, as a share of its own
    fitting_updates: int = 24  # no fewer than these, if the run has so many
    fitting_step: float = 0.01  # the cells that a tier moves by, at most, in the first of them; it falls to nothing
    fitting_pull: float = 2.0  # the share of the way back to its weight that a tier is drawn when it moves by a cell

    # What is learned, and what is kept.
    completion_only: bool = False
    average: float = 0.4  # the share of the run, at its end, over which weights are averaged
    averaged_rate: float = 0.3  # where the learning rate of averaged weights ends, as a share of its highest value
    averaged_updates: int = 32  # no more updates than these are averaged
    held_back: float = 1 / 32  # the share of sequences, at their end, that is not learned where others are seen again
    held_back_most: int = 64  # no more sequences than these are held back
    measurements: int = 20  # how often they are measured on in a run

    def learning_rate_for(self, hidden_size: int | None, tokens: float | None) -> float:
        """The learning rate of a run that none was given for.

        Wider layers take smaller steps, in proportion; `hidden_size` is None for adapters, which are not scaled.
        Updates of fewer `tokens`, over all micro-batches and processes, have noisier gradients, by the square root, and
        steps smaller by as much. Larger updates, and those whose tokens are not known, take the reference's rate.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        size = 1.0 if hidden_size is None else self.reference_hidden_size / hidden_size
        noise = 1.0 if tokens is None else min(1.0, tokens / self.reference_tokens) ** 0.5
        return self.reference_rate * size * noise


RECIPES = {
    "default": Recipe(),
    # The paper's settings. Its figures before tuning rule out plain truncation: `nearest` is what matches them.
    "paper": Recipe(
        optim="sgd",
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        warmup_steps=0.0,
        max_grad_norm=0.0,
        method="otaro",
        scheme="nearest",
        completion_only=True,
        average=0.0,
    ),
}


def find_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise OtaroError(f"unknown recipe {name!r}: choose {' or '.join(RECIPES)}")
    return RECIPES[name]


def settings(name: str = "default", **changes: Any) -> dict[str, Any]:
    """The settings of a recipe as arguments for :class:`otaro.tune.config.TuneArguments`, with changes.

    Averaging, holding text back and learning from prompts are the method tiers' unless they are asked for; where a run
    keeps its best checkpoint, or only fits, there is nothing to average.
    """
    recipe = find_recipe(name)
    chosen = {"recipe": name, **{setting: getattr(recipe, setting) for setting in SETTINGS}}
    if changes.get("method", recipe.method) != "tiers":
        chosen |= {"average": 0.0, "held_back": 0.0, "completion_only": True}
    if changes.get("load_best_model_at_end") or changes.get("fit_only"):
        chosen["average"] = 0.0
    return {**chosen, **changes}
