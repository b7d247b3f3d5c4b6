"""Held-out text: where data are seen several times, it says when a model begins to learn them by heart.

The last sequences are not learned: a mean of the weights that goes with the run is measured on them time and again, in
full precision, and its best value is kept. docs/method.md says when a run ends by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

from otaro.refresh import Refresher
from otaro.tune.data import IGNORED
from otaro.tune.tiers import reshard
from otaro.tune.update import Batch, without_packing

PASSES = 2
"""Data seen fewer times than these are learned whole."""
WORSE = 2
"""Measurements in a row that must be worse than the best."""


@dataclass
class Watch:
    """What held-out text has said so far."""

    loss: float | None = None  # the lowest
    update: int = 0  # which it was measured after
    worse: int = 0  # measurements since then
    ended: int = 0  # the update that learning ended with, 0 while it has not

    def take(self, update: int, loss: float) -> bool:
        """Take a measurement; whether it is the best one."""
        if self.loss is None or loss < self.loss:
            self.loss, self.update, self.worse = loss, update, 0
            return True
        self.worse += 1
        return False


def hold_back(sequences: Any, share: float, most: int) -> tuple[Any, Any]:
    """A data set in two: what is learned, and the last sequences; None for these where there are too few.

    A data set is anything the Trainer takes; of a stream nothing is held back.
    """
    count = min(most, int(share * len(sequences))) if hasattr(sequences, "__len__") else 0
    if not count:
        return sequences, None
    learned = len(sequences) - count
    select = getattr(sequences, "select", lambda indices: Subset(sequences, indices))
    return select(range(learned)), select(range(learned, learned + count))


@torch.no_grad()
def mean_loss(
    model: nn.Module, batches: Iterable[Batch], weights: Refresher, context: Callable[[], AbstractContextManager[Any]]
) -> Tensor:
    """Cross entropy in full precision over all tokens with a label."""
    total, count = [], []
    training = model.training
    model.eval()
    weights.set_width(None)
    for batch in batches:
        targets = batch["labels"][:, 1:].flatten()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        with without_packing([batch]), context():
            logits = model(**inputs, use_cache=False).logits[:, :-1]
        total.append(cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORED, reduction="sum"))
        count.append((targets != IGNORED).sum())
    model.train(training)
    reshard(model)
    return torch.stack(total).sum() / torch.stack(count).sum().clamp(min=1)
