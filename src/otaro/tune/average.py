"""Weight averaging: the result of a run is the mean of its weights over its end.

The mean lies in the optimizer's state beside each parameter's own entries, so that checkpoints have it, sharded or
not: :func:`reserve` makes room when the optimizer first steps, :func:`add_weights` takes the weights in after an
update, :func:`use_average` puts the mean in their place. Which updates are taken in follows from their number alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from otaro.tune.tiers import local

AVERAGE = "average"
"""The entry of a parameter's state."""
RUNNING, BEST = "running", "best"
"""Those of a run that measures on held-out text (`otaro.tune.held_out`)."""
FEWEST = 2
"""Where there would be fewer, the run is too short for a mean, and is as one without."""


def average_index(update: int, updates: int, share: float, most: int) -> int:
    """Which one of those averaged an update is, counted from 1; 0 where it is not. `share` is that of the run.

    The last update always is; there are no more than `most`.
    """
    before, now = (averaged_updates(number, updates, share, most) for number in (update - 1, update))
    return now if now > before else 0


def averaged_updates(update: int, updates: int, share: float, most: int) -> int:
    """Over how many updates weights are averaged once an update is done."""
    span = round(share * updates)
    every = max(1, math.ceil(span / most))
    in_all = math.ceil(span / every)
    return 0 if in_all < FEWEST else max(0, in_all - math.ceil((updates - update) / every))


def reserve(optimizer: Optimizer, entries: Sequence[str] = (AVERAGE,)) -> None:
    """Let an optimizer have room for means, from its first step on."""
    before: dict[Tensor, Tensor] = {}

    def is_new(optimizer: Optimizer) -> Iterator[Tensor]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and AVERAGE not in optimizer.state.get(parameter, {}):
                    yield parameter

    # A parameter that moves for the first time while others are averaged had the same value in all of them so far.
    def remember(optimizer: Optimizer, *_: Any) -> None:
        before.update({parameter: parameter.detach().clone() for parameter in is_new(optimizer)})

    # Not sooner: an optimizer takes an empty state for a parameter that it has not met.
    def make_room(optimizer: Optimizer, *_: Any) -> None:
        for parameter in list(before):
            value = before.pop(parameter)
            optimizer.state[parameter].update({entry: value.clone() for entry in entries})

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(make_room)


def limit_decay(scheduler: Any, warm_up: int, final: float) -> None:
    """Let the learning rate fall no further than to `final` of the highest, once the warm-up is over."""

    def limited(factor: Callable[[int], float]) -> Callable[[int], float]:
        return lambda update: factor(update) if update < warm_up else final + (1 - final) * factor(update)

    if isinstance(scheduler, LambdaLR):
        scheduler.lr_lambdas = [limited(factor) for factor in scheduler.lr_lambdas]


def _both(optimizer: Optimizer, entry: str = AVERAGE) -> Iterator[tuple[Tensor, Tensor]]:
    """The mean of each parameter and the parameter, what this process holds of them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            average = optimizer.state.get(parameter, {}).get(entry)
            if average is not None:
                yield local(average), local(parameter.detach())


@torch.no_grad()
def add_weights(optimizer: Optimizer, number: float, entry: str = AVERAGE) -> None:
    """Take the weights in; `number` says which one of those taken in this is, counted from 1."""
    both = list(_both(optimizer, entry))
    if both:
        torch._foreach_lerp_([average for average, _ in both], [weight for _, weight in both], 1 / number)


@contextmanager
def in_place(optimizer: Optimizer, entry: str) -> Iterator[None]:
    """A mean in the place of the weights, and they in its."""
    _swap(optimizer, entry)
    try:
        yield
    finally:
        _swap(optimizer, entry)


@torch.no_grad()
def _swap(optimizer: Optimizer, entry: str) -> None:
    for average, weight in _both(optimizer, entry):
        before = weight.clone()
        weight.copy_(average)
        average.copy_(before)


def running_weight(update: int, share: float) -> float:
    """What :func:`add_weights` is told for a mean that goes with the run: as old, in the mean, as that over the last
    share of the updates so far. Later ones count more, by a power of their number, so one copy is enough."""
    power = 2 / share - 2
    return max(1.0, (update + power) / (power + 1))


@torch.no_grad()
def copy_mean(optimizer: Optimizer, source: str, target: str) -> None:
    """Make one mean a copy of another."""
    for (old, _), (new, _) in zip(_both(optimizer, target), _both(optimizer, source), strict=True):
        old.copy_(new)


@torch.no_grad()
def use_average(optimizer: Optimizer) -> None:
    """Put the mean in the place of the weights."""
    for average, weight in _both(optimizer):
        weight.copy_(average)
