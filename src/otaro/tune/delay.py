"""LAA, low-precision asynchronous accumulation: an optimizer that lets ultra-low widths wait.

A batch at an ultra-low width does not update the weights; its gradient, after clipping, is added to a buffer. After N
such batches the buffer is applied in one update and cleared. Other widths update as usual in between, with their own
gradient alone. docs/method.md says what was decided where the paper is silent.

The buffer costs one more copy of the gradients, in 16 bits where `dtype` says so. Under Adam the size of a gradient
matters only beside the others': with the mean, one update in N, the ultra-low widths are hardly trained.

In a checkpoint the buffer lies beside the wrapped optimizer's own state of each parameter, and the count in its
parameter groups: distributed checkpoints (FSDP) know these two places and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from otaro.precision import Precision

APPLY = ("sum", "mean")
HELD, HELD_GRADIENT = "held", "held_gradient"


class DelayedOptimizer(Optimizer):
    """Any torch optimizer with LAA around it. Set :attr:`width` before each step to the width of its gradient.

    A step forgets the width: one without it goes to the wrapped optimizer as it is.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        ultra_low: Iterable[Precision],
        delay: int = 10,
        apply: str = "sum",
        dtype: torch.dtype | None = None,
    ) -> None:
        # The wrapped optimizer has the groups, the state and the hooks; the base class would make a second set of them.
        self.optimizer = optimizer
        self.ultra_low = frozenset(ultra_low)
        self.delay = delay
        self.apply = apply
        self.dtype = dtype
        self.width: Precision | None = None
        self._buffer: dict[Tensor, Tensor] = {}
        self._count(0)

    @property
    def held(self) -> int:
        """How many gradients wait in the buffer."""
        return int(self.param_groups[0][HELD])

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update, hold, or release what was held. Gradients are computed before: a closure is refused."""
        if closure is not None:
            raise ValueError("a delayed optimizer takes no closure: compute the gradients before the step")
        width, self.width = self.width, None
        if width not in self.ultra_low:
            self.optimizer.step()
            return
        for parameter in self._parameters():
            if parameter.grad is not None:
                if parameter in self._buffer:
                    self._buffer[parameter].add_(parameter.grad)
                else:
                    self._buffer[parameter] = parameter.grad.to(self.dtype or parameter.grad.dtype, copy=True)
        self._count(self.held + 1)
        if self.held < self.delay:
            return
        for parameter in list(self._buffer):
            held = self._buffer.pop(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            parameter.grad.copy_(held)
            if self.apply == "mean":
                parameter.grad.div_(self.delay)
        self._count(0)
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, with each parameter's part of the buffer in its state.

        An empty part is there as zeros: a distributed checkpoint is read into the entries that the reader has.
        """
        inner = self.optimizer.state_dict()
        state = {index: dict(entries) for index, entries in inner["state"].items()}
        for index, parameter in enumerate(self._parameters()):
            if parameter.requires_grad:
                held = self._buffer.get(parameter)
                gradient = torch.zeros_like(parameter, dtype=self.dtype, requires_grad=False) if held is None else held
                state.setdefault(index, {})[HELD_GRADIENT] = gradient
        return {**inner, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Parameters are known by their position, or by name in a distributed checkpoint; the groups list them in order.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        state = {}
        gradients = {}
        for key, entries in state_dict["state"].items():
            own = {name: value for name, value in entries.items() if name != HELD_GRADIENT}
            if own:
                state[key] = own
            if HELD_GRADIENT in entries:
                gradients[key] = entries[HELD_GRADIENT]
        self.optimizer.load_state_dict({**state_dict, "state": state})
        self._buffer = {}
        if self.held:
            for key, parameter in zip(keys, self._parameters(), strict=True):
                if key in gradients:
                    self._buffer[parameter] = gradients[key].to(parameter.device, copy=True)

    def _count(self, held: int) -> None:
        for group in self.param_groups:
            group[HELD] = held

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
