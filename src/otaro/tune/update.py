"""One update: its passes, their losses, and who gets the gradients.

The wide pass goes through every sequence of the update at `Plan.wide`; its loss is the model's own. The narrow pass, if
there is one, goes through the same sequences, or some of them, at `Plan.narrow`: it learns from the predictions of the
wide pass and from the labels. Then the tiers take their shares of the gradient of the weights (`otaro.tune.tiers`).

:func:`compute_gradients` needs no trainer and leaves the gradients in the parameters, for whoever clips and steps.
Nothing in it waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import masking_utils

from otaro.precision import Precision
from otaro.refresh import Refresher
from otaro.tune.data import IGNORED, PROMPT_MASK
from otaro.tune.distillation import Kernel, distilled_loss, loss_and_gradient
from otaro.tune.tiers import average_gradients, share_gradients

Batch = dict[str, Any]
Loss = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
"""The loss of a micro-batch, its share of the update's, and the logits."""


@dataclass(frozen=True)
class Plan:
    """What an update is made of."""

    wide: Precision | None
    """The width of the pass that learns from the labels; None is full precision."""
    narrow: Precision | None = None
    """The width of the pass that learns from its predictions; None: there is none."""
    distillation: float = 0.0
    """How much of the narrow pass's loss is the divergence from the wide one's predictions, not the cross entropy."""
    thinned: tuple[int, int] = (1, 1)
    """The narrow pass goes through so many of every so many sequences."""
    shares: Mapping[Precision, float] = field(default_factory=dict)
    """What the tiers take of the weights' gradient."""


@dataclass(frozen=True)
class Processes:
    """The processes that an update is spread over; `total` adds up over them."""

    count: int = 1
    index: int = 0
    total: Callable[[Tensor], Tensor] = lambda value: value
    sync_each_batch: bool = False
    """Sharded gradients are added up after each micro-batch, which takes less memory, not after the last one."""


def compute_gradients(
    model: nn.Module,
    batches: Sequence[Batch],
    plan: Plan,
    weights: Refresher,
    *,
    batch_size: int,
    loss: Loss | None = None,
    backward: Callable[[Tensor], None] = Tensor.backward,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    processes: Processes = Processes(),
    kernel: Kernel = loss_and_gradient,
) -> dict[Precision | None, Tensor]:
    """Add the gradient of an update to the parameters'; returns the loss at each width, this process's share of it.

    `batches` are the micro-batches, of `batch_size` sequences but for the last ones of an epoch, on the model's device.
    `loss` computes that of the wide pass, left out it is the model's own; `context` is what passes run in, such as
    autocast; `kernel` computes the narrow pass's loss.
    """
    narrow = plan.narrow
    losses: dict[Precision | None, Tensor] = {}
    rows = [
        narrow_rows(plan, number, len(batch["labels"]), batch_size, processes) if narrow is not None else []
        for number, batch in enumerate(batches)
    ]
    narrow_tokens = processes.total(_predictions(batches, rows)) if narrow is not None else None
    if loss is None:
        loss = _model_loss(processes.total(_predictions(batches)), processes.count, context)
    with _without_packing(batches):
        for number, batch in enumerate(batches):
            inputs = {name: value for name, value in batch.items() if name != PROMPT_MASK}
            last = number == len(batches) - 1 or processes.sync_each_batch
            with _synchronised(model, last, apart=narrow is not None):
                weights.set_width(plan.wide, again=number > 0)
                wide_loss, logits = loss(model, dict(inputs))
                backward(wide_loss)
                _add(losses, plan.wide, wide_loss)
                if narrow is not None:
                    assert narrow_tokens is not None
                    # Gradients and losses are averaged over the processes, these are parts of a sum.
                    scale = processes.count / narrow_tokens.clamp(min=1)
                    weights.set_width(narrow, again=True)
                    part = _narrow_part(batch, rows[number], sharded=isinstance(model, FSDPModule))
                    if part is None:
                        _add(losses, narrow, torch.zeros((), device=logits.device))
                    else:
                        taken, inputs, labels, prompt = part
                        if not plan.distillation:
                            prompt = None  # without predictions it is learned from the data, as completions are
                        teacher = logits.detach()[taken]
                        with context():
                            narrow_logits = model(**inputs, use_cache=False).logits
                            value, cross_entropy = distilled_loss(
                                narrow_logits, teacher, labels, plan.distillation, prompt, kernel
                            )
                        backward(value * scale)
                        _add(losses, narrow, cross_entropy * scale)
    if narrow is not None:
        if isinstance(model, DistributedDataParallel):
            average_gradients(model)
        share_gradients(model, plan.shares, weights)
    return losses


@contextmanager
def _without_packing(batches: Sequence[Batch]) -> Iterator[None]:
    """Batches that come without positions have one sequence to a row, so transformers need not look whether positions
    begin anew somewhere, which it would wait for the device for in every pass."""
    look = masking_utils.find_packed_sequence_indices
    if not any("position_ids" in batch for batch in batches):
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = look


def narrow_rows(plan: Plan, number: int, size: int, batch_size: int, processes: Processes) -> list[int]:
    """Which of the `size` sequences of the n-th micro-batch the narrow pass goes through.

    Sequences are numbered through over micro-batches and processes, so that they are the same ones however an update is
    spread out: the n-th micro-batch of a process begins with the sequence (n · processes + process) · batch size.
    """
    kept, of = plan.thinned
    first = (number * processes.count + processes.index) * batch_size
    return [row for row in range(size) if (first + row) % of < kept]


def gradients_apart(model: nn.Module) -> AbstractContextManager[None]:
    """Passes after which DDP does not wait for the gradients of all weights: each has those of one tier only.

    Not accelerate's `no_sync`, which does nothing for a single process; DDP waits there too.
    """
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def _synchronised(model: nn.Module, last: bool, *, apart: bool) -> AbstractContextManager[None]:
    """Gradients are added up over processes after the last micro-batch; DDP's, where passes keep `apart`, later."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return nullcontext() if last and not apart else gradients_apart(model)


def _model_loss(tokens: Tensor, count: int, context: Callable[[], AbstractContextManager[Any]]) -> Loss:
    """A process's part of the sum over all tokens, times the processes, over which gradients are averaged."""

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        with context():
            outputs = model(**batch, use_cache=False, num_items_in_batch=tokens.clamp(min=1))
        return outputs.loss * count, outputs.logits

    return loss


def _predictions(batches: Sequence[Batch], rows: Sequence[Sequence[int]] | None = None) -> Tensor:
    """What there is to predict in the micro-batches, or in those rows of each."""
    total = torch.zeros((), dtype=torch.int64, device=batches[0]["labels"].device)
    for number, batch in enumerate(batches):
        predicted = (batch["labels"][:, 1:] != IGNORED).sum(-1)
        total += (predicted if rows is None else predicted[_places(rows[number], predicted)]).sum()
    return total


def _narrow_part(
    batch: Batch, rows: Sequence[int], *, sharded: bool
) -> tuple[Any, Batch, Tensor, Tensor | None] | None:
    """The rows of a micro-batch, as an index, as inputs, their labels and what of them is prompt; None for none.

    Processes that shard weights gather each other's in every pass: one without rows goes along and adds nothing.
    """
    if not rows and not sharded:
        return None
    labels = batch["labels"]
    size = len(labels)
    # All are taken without a copy.
    taken: Any = slice(None) if len(rows) == size else _places(rows or [0], labels)
    part = {
        name: value[taken] if isinstance(value, Tensor) and value.shape[:1] == (size,) else value
        for name, value in batch.items()
    }
    chosen, prompt = part.pop("labels"), part.pop(PROMPT_MASK, None)
    return taken, part, chosen if rows else torch.full_like(chosen, IGNORED), prompt


def _places(rows: Sequence[int], like: Tensor) -> Tensor:
    return _index(tuple(rows), like.device)


@lru_cache(maxsize=256)
def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once for all updates: a copy to the device waits for it."""
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _add(losses: dict[Precision | None, Tensor], width: Precision | None, loss: Tensor) -> None:
    loss = loss.detach().float()
    losses[width] = losses[width] + loss if width in losses else loss
