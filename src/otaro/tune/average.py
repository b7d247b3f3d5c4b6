"""The mean of the weights over the end of a run, which is what the run gives.

Weights that go on moving around a good place have it as their mean, and are nearer to it by that than by coming to rest
(docs/results.md has the trials). So where weights are averaged the learning rate falls to FINAL of its highest value
(:func:`hold_up`) and not to whatever the schedule ends with.

Groups of parameters marked RESTS are left out of both. With tiers that is what the narrowest width computes with: what
the others are averaged in are its cells, and a mean of its own weights is none of what they are rounded to.

The mean lies in the optimizer's state beside each parameter's own entries, so that checkpoints have it, sharded or
not: :func:`keep` makes room when the optimizer first steps, :func:`add` takes the weights in after an update,
:func:`use` puts the mean in their place. Which updates are taken in follows from their number alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

FINAL = 0.3
"""Where the learning rate ends, as a share of its highest value."""
RESTS = "rests"
"""The mark of a group of parameters that comes to rest and is not averaged."""
AVERAGE = "average"
"""The entry of a parameter's state."""
MOST = 32
"""No more updates than these are taken in: more cost time and change nothing."""
FEWEST = 2
"""Where there would be fewer, the run is too short for a mean, and is as one without."""


def place(update: int, updates: int, share: float) -> int:
    """Which one of those taken in an update is, counted from 1; 0 where it is not. `share` is that of the run.

    The last update always is.
    """
    before = taken(update - 1, updates, share)
    now = taken(update, updates, share)
    return now if now > before else 0


def taken(update: int, updates: int, share: float) -> int:
    """How many are taken in once an update is done."""
    span = round(share * updates)
    every = max(1, math.ceil(span / MOST))
    in_all = math.ceil(span / every)
    return 0 if in_all < FEWEST else max(0, in_all - math.ceil((updates - update) / every))


def keep(optimizer: Optimizer) -> None:
    """Let an optimizer have room for the mean, from its first step on."""
    before: dict[Tensor, Tensor] = {}

    def is_new(optimizer: Optimizer) -> Iterator[Tensor]:
        for group in optimizer.param_groups:
            for parameter in () if group.get(RESTS) else group["params"]:
                if parameter.grad is not None and AVERAGE not in optimizer.state.get(parameter, {}):
                    yield parameter

    # A parameter that moves for the first time while others are averaged had the same value in all of them so far.
    def remember(optimizer: Optimizer, *_: Any) -> None:
        before.update({parameter: parameter.detach().clone() for parameter in is_new(optimizer)})

    # Not sooner: an optimizer takes an empty state for a parameter that it has not met.
    def make_room(optimizer: Optimizer, *_: Any) -> None:
        for parameter in list(before):
            optimizer.state[parameter][AVERAGE] = before.pop(parameter)

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(make_room)


def hold_up(scheduler: Any, warm_up: int) -> None:
    """Let the rates of what is averaged fall no further than to FINAL, once the warm-up is over."""
    if isinstance(scheduler, LambdaLR):
        for number, group in enumerate(scheduler.optimizer.param_groups):
            if not group.get(RESTS):
                scheduler.lr_lambdas[number] = partial(_held_up, scheduler.lr_lambdas[number], warm_up)


def _held_up(factor: Callable[[int], float], warm_up: int, update: int) -> float:
    found = factor(update)
    return found if update < warm_up else FINAL + (1 - FINAL) * found


def _both(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """The mean of each parameter and the parameter, what this process holds of them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            average = optimizer.state.get(parameter, {}).get(AVERAGE)
            if average is not None:
                held = parameter.detach()
                yield (
                    average.to_local() if isinstance(average, DTensor) else average,
                    held.to_local() if isinstance(held, DTensor) else held,
                )


@torch.no_grad()
def add(optimizer: Optimizer, number: int) -> None:
    """Take the weights in; `number` says which one of those taken in this is, counted from 1."""
    both = list(_both(optimizer))
    if both:
        torch._foreach_lerp_([average for average, _ in both], [weight for _, weight in both], 1 / number)


@torch.no_grad()
def use(optimizer: Optimizer) -> None:
    """Put the mean in the place of the weights."""
    for average, weight in _both(optimizer):
        weight.copy_(average)
