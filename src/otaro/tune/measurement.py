"""What the method tiers measures before its first update, on that update's batches, learning nothing from them.

How much of what there is to learn is the same at every width depends on the model. The cosine between the gradient of a
tier and that of the weights it belongs to says it, and decides which share of the latter the tier takes; losses at the
wide widths say whether rounding to the narrowest of them hurts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from otaro.errors import OtaroError
from otaro.nn import FakeSefp
from otaro.precision import Precision
from otaro.refresh import Refresher
from otaro.tune.data import IGNORED, PROMPT_MASK
from otaro.tune.distillation import distilled_loss
from otaro.tune.recipe import Recipe
from otaro.tune.tiers import average_gradients, local_rows
from otaro.tune.update import Batch, Processes, gradients_apart

LOSS_SCALE = 1024.0
"""Of the loss whose gradients are compared: those of a mean over tokens would vanish in float16."""


@dataclass(frozen=True)
class Measured:
    """By width: cosines between a tier's gradient and the wide one, losses, and shares of the wide gradient."""

    agreement: Mapping[Precision, float]
    losses: Mapping[Precision, float]
    shares: Mapping[Precision, float]

    def to_json(self) -> dict[str, dict[str, float]]:
        """By width, the widest first: in the same order before a stop and after it."""
        everything = {"agreement": self.agreement, "losses": self.losses, "shares": self.shares}
        return {name: {str(width): of[width] for width in sorted(of, reverse=True)} for name, of in everything.items()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Mapping[str, float]]) -> Measured:
        names = ("agreement", "losses", "shares")
        return cls(*({Precision(width): value for width, value in saved[name].items()} for name in names))


@torch.no_grad()
def agreement(model: nn.Module, total: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[Precision, float]:
    """The cosine between the gradient of the tiers of each width and that of the weights they belong to.

    It is over the whole model, from passes over the same batches; widths without a gradient are left out. `total` adds
    up over processes, which may hold shards.
    """
    listed: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        if isinstance(module, FakeSefp):
            listed.update(
                {id(module._parameters[name]): (module._parameters[name], of) for name, of in module.tiers.items()}
            )
    widths = sorted({width for _, tiers in listed.values() for width, _ in tiers})
    if not widths:
        return {}
    sums = torch.zeros(len(widths), 3, device=next(iter(listed.values()))[0].device)
    for weight, tiers in listed.values():
        for width, tier in tiers:
            # An expert that no token went through has no gradient, or zeros under DDP: the same.
            wide, narrow = (
                torch.zeros((), device=tensor.device) if tensor.grad is None else local_rows(tensor.grad, False).float()
                for tensor in (weight, tier)
            )
            products = torch.stack([(narrow * wide).sum(), narrow.square().sum(), wide.square().sum()])
            sums[widths.index(width)] += products.to(sums.device)
    return {
        width: product / math.sqrt(narrow * wide)
        for width, (product, narrow, wide) in zip(widths, total(sums).tolist(), strict=True)
        if narrow * wide != 0
    }


def measure(
    model: nn.Module,
    batches: Sequence[Batch],
    weights: Refresher,
    recipe: Recipe,
    *,
    wide: tuple[Precision, Precision],
    tiers: Sequence[Precision],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    processes: Processes = Processes(),
) -> Measured:
    """Losses at the widest and the narrowest `wide` width and at those of the `tiers`, and the tiers' agreement."""
    device = batches[0]["labels"].device
    tokens = torch.stack([(batch["labels"][:, 1:] != IGNORED).sum() for batch in batches]).sum()
    count = max(1, int(processes.total(tokens)))
    model.train()
    before = weights.width
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
    cosines: dict[Precision, float] = {}
    losses: dict[Precision, Tensor] = {}
    widest, narrowest = wide
    # The widest tier first: where a floor keeps the narrower one out, its passes add to the wider one's gradient.
    for width in dict.fromkeys((narrowest, widest, *sorted(tiers, reverse=True))):
        learned = width in (widest, *tiers)
        weights.set_width(width)
        # Dropout leaves out the same at every width.
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            for batch in batches:
                inputs = {name: value for name, value in batch.items() if name not in ("labels", PROMPT_MASK)}
                with gradients_apart(model), torch.set_grad_enabled(learned):
                    with context():
                        logits = model(**inputs, use_cache=False).logits
                        loss, _ = distilled_loss(logits, logits.detach(), batch["labels"], 0.0)
                    losses[width] = losses.get(width, 0.0) + loss.detach().float()
                    if learned:
                        (loss * (LOSS_SCALE / count)).backward()
        if learned and isinstance(model, DistributedDataParallel):
            average_gradients(model)
        if width in tiers:
            cosines = {**agreement(model, processes.total), **cosines}
    model.zero_grad()
    weights.set_width(before)
    sums = processes.total(torch.stack([*losses.values()])).tolist()
    means = {width: total / count for width, total in zip(losses, sums, strict=True)}
    for width, value in [*means.items(), *cosines.items()]:
        if not math.isfinite(value):
            raise OtaroError(f"before tuning the loss or its gradient at {width} is not finite: look at the model")
    return Measured(cosines, means, recipe.shares(cosines))
