"""Passes replayed as CUDA graphs.

A pass of a small model is hundreds of launches, compiled or not, and Python takes longer to make them than the GPU to
do what they ask for. A pass that comes again in the same shape is captured, and from then on is one launch. What it
reads stands still in memory: parameters, the values that `otaro.refresh` keeps, copies of its inputs, and gradients,
which all graphs add to the same buffers.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

PLAIN = 2
"""How often a pass is computed launch by launch before it is captured: what it needs is compiled and set up then."""
LAUNCH_BOUND = 2e13
"""Operations of a pass above which it takes a GPU longer than making its launches takes Python."""


def pays(model: nn.Module, tokens: float) -> bool:
    """Whether the launches of passes over so many tokens cost more than their work."""
    return 6 * tokens * sum(parameter.numel() for parameter in model.parameters()) < LAUNCH_BOUND


Function = Callable[[dict[str, Tensor]], Tensor]


@contextmanager
def masking(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Another function in the place of one of those that transformers makes masks with."""
    before = getattr(masking_utils, name)
    setattr(masking_utils, name, function)
    try:
        yield
    finally:
        setattr(masking_utils, name, before)


def without_masks() -> AbstractContextManager[None]:
    """transformers 5.17 makes masks that are not needed where a graph is captured, lest something else comes later:
    attention with one is another, slower computation, for which layers would be compiled anew."""
    return masking("is_tracing", lambda tensor=None: False)


class Captured:
    """A function captured with its inputs: `replay` does what it did, with what is in `inputs` then."""

    def __init__(self, function: Function, inputs: dict[str, Tensor], pool: Any) -> None:
        self.inputs = inputs
        graph = torch.cuda.CUDAGraph()
        # Threads that bring batches to the device may go on with it.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"), without_masks():
            self.result = function(dict(inputs))
        self.replay = graph.replay


class Graphs:
    """What has been captured of a model's passes; with `enabled` False, nothing."""

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        self.enabled = enabled
        self._model = model
        self.forget()

    def forget(self) -> None:
        """Give the memory of all graphs back."""
        self._captured: dict[object, Captured] = {}
        self._used: dict[object, list[nn.Parameter]] = {}
        self._seen: Counter[object] = Counter()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._pool: Any = None

    def run(self, kind: object, function: Function, inputs: Mapping[str, Tensor]) -> Tensor:
        """The result of `function`, which may add to gradients, for inputs on the device.

        `kind` tells one function from another. Nothing but the inputs may differ from call to call: where a function
        reads other tensors, these are the same ones each time. The result lasts until the next call of this kind.
        """
        if not self.enabled or not all(isinstance(value, Tensor) for value in inputs.values()):
            return function(dict(inputs))
        key = (kind, *((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items()))
        if key not in self._captured:
            self._seen[key] += 1
            if self._seen[key] <= PLAIN:
                result = function(dict(inputs))
                self._used[key] = [part for part in self._model.parameters() if part.grad is not None]
                return result
            try:
                self._take_gradients(self._used[key])
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                copies = {name: tensor.clone() for name, tensor in inputs.items()}
                self._captured[key] = Captured(function, copies, self._pool)
            except RuntimeError as failure:
                error: BaseException = failure
                self.forget()
                self.enabled = False
                while error.__context__ is not None:
                    error = error.__context__  # what ended the capture, not that it ended
                first = str(error).partition("\n")[0]
                warnings.warn(
                    f"otaro: passes are launched one by one, they could not be captured: {first}", stacklevel=2
                )
                return function(dict(inputs))
        captured = self._captured[key]
        self._take_gradients(self._used[key])
        for name, copy in captured.inputs.items():
            copy.copy_(inputs[name], non_blocking=True)
        captured.replay()
        return captured.result

    def _take_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Have gradients in the buffers that graphs add to, whatever they were in until now."""
        fresh = []
        for parameter in parameters:
            if parameter not in self._gradients:
                self._gradients[parameter] = torch.empty_like(parameter)
            buffer = self._gradients[parameter]
            if parameter.grad is None:
                fresh.append(buffer)
            elif parameter.grad is not buffer:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer
        if fresh:
            torch._foreach_zero_(fresh)
