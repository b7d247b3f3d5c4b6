"""The gradients of an update: its micro-batches at one width.

:func:`compute_gradients` needs no trainer and leaves the gradients in the parameters, for whoever clips and steps.
Nothing in it waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from otaro.precision import Precision
from otaro.refresh import Refresher
from otaro.tune.data import IGNORED
from otaro.tune.graphs import Graphs, masking

Batch = dict[str, Any]
Loss = Callable[[nn.Module, Batch], Tensor]
"""The loss of a micro-batch, its share of the update's."""


@dataclass(frozen=True)
class Processes:
    """The processes that an update is spread over; `total` adds up over them."""

    count: int = 1
    total: Callable[[Tensor], Tensor] = lambda value: value
    sync_each_batch: bool = False
    """Sharded gradients are added up after each micro-batch, which takes less memory, not after the last one."""


def compute_gradients(
    model: nn.Module,
    batches: Sequence[Batch],
    width: Precision | None,
    weights: Refresher,
    *,
    loss: Loss | None = None,
    backward: Callable[[Tensor], None] = Tensor.backward,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    processes: Processes = Processes(),
    graphs: Graphs | None = None,
) -> Tensor:
    """Add the gradient of an update at a width to the parameters'; returns this process's share of the loss.

    `batches` are the micro-batches, on the model's device; None is full precision. `loss` computes that of one, left
    out it is the model's own; `context` is what passes run in, such as autocast. With `graphs`, passes may be captured:
    then `loss` must find all that changes in its batch.
    """
    if graphs is not None and loss is None:
        raise ValueError("the model's own loss counts the tokens of one update, which a captured pass would keep")
    total = torch.zeros((), device=batches[0]["labels"].device)
    if loss is None:
        loss = _model_loss(processes.total(predictions(batches)), processes.count, context)

    def compute(batch: Batch) -> Tensor:
        value = loss(model, batch)
        backward(value)
        return value.detach().float()

    with without_packing(batches):
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1 or processes.sync_each_batch
            with _synchronised(model, last):
                weights.set_width(width, again=number > 0)
                total = total + (compute(dict(batch)) if graphs is None else graphs.run(width, compute, batch))
    return total


def without_packing(batches: Sequence[Batch]) -> AbstractContextManager[None]:
    """Batches that come without positions have one sequence to a row, so transformers need not look whether positions
    begin anew somewhere, which it would wait for the device for in every pass."""
    if any("position_ids" in batch for batch in batches):
        return nullcontext()
    return masking("find_packed_sequence_indices", lambda position_ids: None)


def _synchronised(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Gradients are added up over processes after the last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    if last or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()  # not accelerate's, which does nothing for a single process; DDP waits there too


def _model_loss(tokens: Tensor, count: int, context: Callable[[], AbstractContextManager[Any]]) -> Loss:
    """A process's part of the sum over all tokens, times the processes, over which gradients are averaged."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with context():
            outputs = model(**batch, use_cache=False, num_items_in_batch=tokens.clamp(min=1))
        return outputs.loss * count

    return loss


def predictions(batches: Sequence[Batch]) -> Tensor:
    """What there is to predict in the micro-batches."""
    return torch.stack([(batch["labels"][:, 1:] != IGNORED).sum() for batch in batches]).sum()
