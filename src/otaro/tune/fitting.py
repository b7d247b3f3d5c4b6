"""Fitting: narrow widths learn to predict what the tuned model predicts; docs/method.md says why.

In full precision the model predicts a batch of sequences, then each of the widths predicts them and learns from the
divergence between the two. Weights stay as they are. What decides the last bit of a width, its tier, moves by

    step · cell · g / sqrt(g² + mean of g² in the group)

so few weights change their code in an update, those near a border that matter, and is drawn back to its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from otaro import ops, sefp
from otaro.precision import Precision
from otaro.refresh import Refresher
from otaro.tune.distillation import Kernel, divergence, loss_and_gradient
from otaro.tune.graphs import Graphs
from otaro.tune.tiers import average_gradients, local_rows, simulated, tiers_of
from otaro.tune.update import Batch, Processes, predictions, without_packing

TOGETHER = 1 << 24
"""Weights that are moved in the same launches; a few copies of them in float32 are made."""
LOSS_SCALE = 1024.0
"""Only the direction of a gradient counts; that of a mean over tokens would vanish in float16."""


def fit(
    model: nn.Module,
    batches: Sequence[Batch],
    weights: Refresher,
    widths: Sequence[Precision],
    step: float,
    *,
    pull: float = 0.0,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    processes: Processes = Processes(),
    kernel: Kernel = loss_and_gradient,
    graphs: Graphs | None = None,
) -> dict[Precision, Tensor]:
    """Move the tiers that decide these widths by `step` cells at most; returns the cross entropy at each.

    The model's gradients are those of nobody else, and gone afterwards. With `graphs`, passes may be captured.
    """
    graphs = Graphs(model, enabled=False) if graphs is None else graphs
    count = processes.total(predictions(batches)).clamp(min=1)
    losses = {width: torch.zeros((), device=count.device) for width in widths}

    def predict(batch: Batch) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "count")}
        with context():
            logits: Tensor = model(**inputs, use_cache=False).logits
        return logits

    def learn(batch: Batch) -> Tensor:
        logits = predict(batch)
        with context():
            loss, entropy = divergence(logits, teacher, batch["labels"], kernel)
        (loss * (LOSS_SCALE / batch["count"])).backward()
        return entropy.detach()

    with without_packing(batches):
        for number, batch in enumerate(batches):
            weights.set_width(None, again=number > 0)
            # Where the pass that teaches is captured, so are those that learn from it: it is always this tensor then.
            teacher = graphs.run("teacher", torch.no_grad()(predict), batch)
            for place, width in enumerate(widths):
                weights.set_width(width, again=number + place > 0)
                entropy = graphs.run(width, learn, {**batch, "count": count})
                losses[width] = losses[width] + entropy * (processes.count / count)
    weights.set_width(None)
    if processes.count > 1 and not isinstance(model, FSDPModule):
        average_gradients(list(tiers_of(model).values()))
    graphs.run(
        "move",
        lambda given: move(model, widths, given["step"], pull),
        {"step": count.new_full((), step, dtype=torch.float32)},  # on the device, where a graph finds it
    )
    model.zero_grad()
    return losses


@dataclass
class _Part:
    """The rows of a tier, of its weight and of its gradient, and the cells of its groups."""

    tier: Tensor
    weight: Tensor
    gradient: Tensor
    cells: Tensor


def move(model: nn.Module, widths: Sequence[Precision], step: Tensor | float, pull: float = 0.0) -> Tensor:
    """Take a step against the gradients of the tiers that decide the widths, and draw them back to their weights;
    returns the step."""
    step = torch.as_tensor(step, dtype=torch.float32)
    waiting: list[_Part] = []
    for part in _parts(model, widths):
        waiting.append(part)
        if sum(part.tier.numel() for part in waiting) >= TOGETHER:
            _move_parts(waiting, step, pull)
            waiting = []
    if waiting:
        _move_parts(waiting, step, pull)
    return step


@torch.no_grad()
def _parts(model: nn.Module, widths: Sequence[Precision]) -> Iterator[_Part]:
    seen: set[int] = set()
    for module in simulated(model):
        for name, tiers in module.tiers.items():
            weight: Any = module._parameters[name]
            turned = module.transposed[name]
            rows = local_rows(weight, turned)
            scale = module.scales.get(name)
            for width in sorted({max(width, module.floor) for width in widths}):
                tier = ops.deciding(weight, width, tiers)
                if tier is weight or id(tier) in seen or tier.grad is None:
                    continue
                seen.add(id(tier))
                scale = ops.scales(rows, module.format) if scale is None else scale
                gradient = sefp.in_groups(local_rows(tier.grad, turned).float(), module.format.group_size)
                yield _Part(local_rows(tier, turned), rows, gradient, sefp.step(scale, width).abs())


@torch.no_grad()
def _move_parts(parts: Sequence[_Part], step: Tensor, pull: float) -> None:
    """The groups of all parts one below the other, since a launch for each would take longer than its work."""
    gradient = torch.cat([part.gradient.flatten(0, -2) for part in parts])
    gradient = gradient.nan_to_num(0.0, 0.0, 0.0)  # one that overflowed says nothing
    size = (gradient.square() + gradient.square().mean(-1, keepdim=True)).sqrt().clamp(min=1e-30)
    cells = torch.cat([part.cells.flatten() for part in parts])[:, None]
    moved = step * cells * gradient / size
    back = (pull * step).clamp(max=1.0)
    for part, groups in zip(parts, moved.split([part.cells.numel() for part in parts]), strict=True):
        part.tier.sub_(groups.view(part.gradient.shape).flatten(-2)[..., : part.tier.shape[-1]])
        part.tier.lerp_(part.weight, back)
