"""Making the values of all weights at once, at the start of an update, where a GPU can do it in one launch.

One launch per layer and operation would cost more than the arithmetic of a small model. The values are written into
buffers of the type the model computes in, one to a weight, which are kept from update to update: layers find them in
`values`, and a captured CUDA graph finds them where they were.
"""

from __future__ import annotations

import torch
from torch import nn

from otaro import ops
from otaro.nn import FakeSefpEmbedding, FakeSefpLinear
from otaro.precision import Precision
from otaro.sefp import Format


class Refresher:
    """Fills the `values` of a model's simulated linear layers and embeddings; call it when width or weights changed.

    On a CPU, at full precision and for sharded weights it leaves the layers to quantise for themselves, when they are
    used. `dtype` is what the model computes in.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        kinds = (FakeSefpLinear, FakeSefpEmbedding)
        self._layers = [module for module in model.modules() if isinstance(module, kinds)]
        self._dtype = dtype
        self._results: dict[int, torch.Tensor] = {}
        self._batches: dict[tuple[object, ...], object] = {}
        self._filled: set[tuple[object, ...]] = set()

    def __call__(self, *, again: bool = False) -> None:
        """`again` says that only the width has changed since the last call: exponents stay as they were found."""
        self.clear()
        if not again:
            self._filled.clear()
        groups: dict[
            tuple[Precision, Format, torch.dtype, tuple[Precision, ...]],
            dict[int, list[FakeSefpLinear | FakeSefpEmbedding]],
        ] = {}
        for layer in self._layers:
            width = self._width(layer)
            if width is not None:
                tiers = tuple(tier for tier, _ in layer.tiers.get("weight", ()))
                shared = groups.setdefault((width, layer.format, layer.weight.dtype, tiers), {})
                shared.setdefault(layer.weight.data_ptr(), []).append(layer)
        for (width, format, dtype, tiers), shared in groups.items():
            self._fill(list(shared.values()), width, format, dtype, tiers)

    def clear(self) -> None:
        """Let the layers quantise for themselves again."""
        for layer in self._layers:
            layer.values = layer.trained = None

    def _width(self, layer: FakeSefpLinear | FakeSefpEmbedding) -> Precision | None:
        weight = layer.weight
        if weight.device.type != "cuda" or type(weight) is not nn.Parameter or not weight.is_contiguous():
            return None
        if ops.quantize_backend(weight.device).__name__ != "otaro.ops.gpu":
            return None
        return layer.width

    def _fill(
        self,
        shared: list[list[FakeSefpLinear | FakeSefpEmbedding]],
        width: Precision,
        format: Format,
        dtype: torch.dtype,
        widths: tuple[Precision, ...],
    ) -> None:
        from otaro.ops import gpu

        weights = [layers[0].weight.detach() for layers in shared]
        key = (format, widths, *(weight.data_ptr() for weight in weights))
        batch = self._batches.get(key)
        if not isinstance(batch, gpu.Batch):
            for weight in weights:
                if weight.data_ptr() not in self._results:
                    self._results[weight.data_ptr()] = torch.empty_like(weight, dtype=self._dtype or dtype)
            results = [self._results[weight.data_ptr()] for weight in weights]
            tiers = [
                (tier, [layers[0].tiers["weight"][index][1].detach() for layers in shared])
                for index, tier in enumerate(widths)
            ]
            batch = gpu.prepare(weights, results, format.group_size, tiers)
            self._batches[key] = batch
        gpu.run(batch, width, format, sliced=True, again=key in self._filled)
        self._filled.add(key)
        for layers, values in zip(shared, batch.results, strict=True):
            for layer in layers:
                layer.values = values
                tiers_of = layer.tiers.get("weight", ())
                # Not by plain assignment, which would make the tier a second parameter of the layer.
                layer.__dict__["trained"] = ops.deciding(layer.weight, width, tiers_of) if tiers_of else None
