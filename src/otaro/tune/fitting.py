"""Fitting: narrow widths learn to predict what the tuned model predicts.

The method tiers tunes as the method fp16 does, with weight averaging. Once averaging has begun, each update also fits
the mean of the weights, which will be the result, to the widths it is rounded to. The mean predicts an update's
sequences in full precision; then each of the widths predicts them and learns from the divergence between the two.
Gradients go to what decides the last bit of a width: its tier, or for the narrowest width without a tier the mean.

A mean hardly moves, so what is learned about the errors of its rounding stays true; weights that are still being tuned
would be in other cells a few updates later. And a mean is the better teacher: what the weights predict changes from
update to update.

Nothing of it reaches the weights that are being tuned: E5M8 is what fp16 would have made of it. A step is a share of
the cell of the width, whatever the learning rate:

    cell · g / sqrt(g² + mean of g² in the group)

so few weights change their code in an update: those near a border that matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from otaro import ops, sefp
from otaro.nn import FakeSefp
from otaro.precision import Precision
from otaro.refresh import Refresher
from otaro.tune.data import IGNORED
from otaro.tune.distillation import Kernel, divergence, loss_and_gradient
from otaro.tune.tiers import average_gradients, local_rows
from otaro.tune.update import Batch, Processes, gradients_apart, without_packing

LOSS_SCALE = 1024.0
"""Only the direction of a gradient counts; that of a mean over tokens would vanish in float16."""


def fit(
    model: nn.Module,
    batches: Sequence[Batch],
    weights: Refresher,
    widths: Sequence[Precision],
    step: float,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    processes: Processes = Processes(),
    kernel: Kernel = loss_and_gradient,
) -> dict[Precision, Tensor]:
    """Move the weights and tiers that decide these widths by `step` cells at most; returns the cross entropy at each.

    The model's gradients are those of nobody else, and gone afterwards.
    """
    tokens = torch.stack([(batch["labels"][:, 1:] != IGNORED).sum() for batch in batches]).sum()
    count = processes.total(tokens).clamp(min=1)
    losses = {width: torch.zeros((), device=tokens.device) for width in widths}
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
    with without_packing(batches), gradients_apart(model):
        for number, batch in enumerate(batches):
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            weights.set_width(None, again=number > 0)
            with torch.no_grad(), context():
                teacher = model(**inputs, use_cache=False).logits
            for place, width in enumerate(widths):
                weights.set_width(width, again=number + place > 0)
                with context():
                    logits = model(**inputs, use_cache=False).logits
                    loss, entropy = divergence(logits, teacher, batch["labels"], kernel)
                (loss * (LOSS_SCALE / count)).backward()
                losses[width] += entropy.detach() * (processes.count / count)
    weights.set_width(None)
    if isinstance(model, DistributedDataParallel):
        average_gradients(model)
    move(model, widths, step)
    model.zero_grad()
    return losses


@torch.no_grad()
def move(model: nn.Module, widths: Sequence[Precision], step: float) -> None:
    """Take a step against the gradients of what decides the widths."""
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FakeSefp):
            continue
        for name, turned in module.transposed.items():
            weight: Any = module._parameters[name]
            rows = local_rows(weight, turned)
            scale = None
            for width in sorted({max(width, module.floor) for width in widths}):
                decider = ops.deciding(weight, width, module.tiers.get(name, ()))
                if id(decider) in seen or decider.grad is None:
                    continue
                seen.add(id(decider))
                scale = ops.scales(rows, module.format) if scale is None else scale
                gradient = sefp.in_groups(local_rows(decider.grad, turned).float(), module.format.group_size)
                size = (gradient.square() + gradient.square().mean(-1, keepdim=True)).sqrt().clamp(min=1e-30)
                moved = sefp.step(scale, width).abs()[..., None] * gradient / size
                local_rows(decider, turned).sub_(step * moved.flatten(-2)[..., : rows.shape[-1]])
