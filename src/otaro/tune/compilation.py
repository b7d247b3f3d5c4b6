"""Compiling what pays on a GPU: decoder layers one by one, which share one compiled graph, and the losses.

A small model's many small launches cost more than their work; compiled, they are few. What is compiled is compiled for
a shape, in the first updates of a run and in the first of those that fit tiers. A micro-batch of another
size, such as the last of an epoch, is computed as it stands: compiling for it would cost more than it saves.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from otaro.nn import FakeSefpExperts
from otaro.tune.distillation import Kernel, loss_and_gradient

GRAPHS = 64
"""Kinds of passes a layer may be compiled for: torch gives up after 8, but with and without tiers are more."""


def can_compile(model: nn.Module) -> bool:
    """Experts choose their tokens by looking at them, which breaks a graph apart."""
    layers = any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    return layers and not any(isinstance(module, FakeSefpExperts) for module in model.modules())


class Compilation:
    """What a run has compiled; with `enabled` False, nothing.

    `same_length` says that all sequences have the same length; else a graph serves any.
    """

    def __init__(self, model: nn.Module, *, enabled: bool, same_length: bool = True, backend: str = "inductor") -> None:
        self.enabled = enabled
        self.kernel: Kernel = loss_and_gradient
        self._kinds: set[object] = set()
        if not enabled:
            return
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
        options: dict[str, Any] = {"dynamic": False if same_length else None, "backend": backend}
        self.kernel = torch.compile(loss_and_gradient, **options)
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.compile(**options)
            elif isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None:
                module.loss_function = torch.compile(module.loss_function, **options)

    def is_new(self, kind: object) -> bool:
        """Whether an update of this kind has not been seen: it is compiled for."""
        new = self.enabled and kind not in self._kinds
        self._kinds.add(kind)
        return new

    def left_out(self) -> AbstractContextManager[Any]:
        """For what is computed too seldom, or in too many shapes, to be compiled for."""
        return torch.compiler.set_stance("force_eager") if self.enabled else nullcontext()
