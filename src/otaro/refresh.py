"""Making the values of all weights at once, at the start of an update, where a GPU can do it in one launch.

One launch per layer and operation would cost more than the arithmetic of a small model. The values are written into
buffers of the type the model computes in, one to a weight, which are kept from update to update: layers find them in
`values`, and a captured CUDA graph finds them where they were. So are the scales of layers that quantise for
themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from otaro import ops
from otaro.errors import OtaroError
from otaro.nn import FakeSefp, FakeSefpEmbedding, FakeSefpLinear
from otaro.precision import Precision

Layer = FakeSefpLinear | FakeSefpEmbedding


class Refresher:
    """Fills the `values` of a model's simulated linear layers and embeddings; call it when width or weights changed.

    On a CPU, at full precision and for sharded weights it leaves the layers to quantise for themselves, when they are
    used, and finds only their scales once for all widths. `dtype` is what the model computes in.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        self._simulated = [module for module in model.modules() if isinstance(module, FakeSefp)]
        self._layers: list[Layer] = [layer for layer in self._simulated if isinstance(layer, Layer)]
        self.dtype = dtype
        self._results: dict[int, Tensor] = {}
        self._scales: dict[nn.Parameter, Tensor] = {}
        self._batches: dict[tuple[object, ...], Any] = {}
        self._known: set[tuple[object, ...]] = set()

    @property
    def width(self) -> Precision | None:
        """What was asked for last; None is full precision."""
        return self._simulated[0].precision if self._simulated else None

    def set_width(self, width: Precision | None, *, again: bool = False) -> None:
        """Compute at a width from now on; None is full precision. `again`: the weights have not changed since."""
        if width is not None and not self._simulated:
            raise OtaroError(f"the model has no simulated layers to compute at {width}: convert.simulate comes first")
        # Past a module's own way of setting attributes, which is slow for hundreds of layers in every pass.
        for layer in self._simulated:
            layer.__dict__["precision"] = width
        self(again=again)

    def in_own_type(self) -> Refresher:
        """One that fills the same layers with values of the weights' own type."""
        if self.dtype is None:
            return self
        other = copy.copy(self)
        other.dtype = None
        other._results, other._batches, other._known = {}, {}, set()
        return other

    def __call__(self, *, again: bool = False) -> None:
        """`again` says that only the width has changed since the last call: scales stay as they were found."""
        self._drop_values()
        if not again:
            self._known.clear()
            self._find_scales()
        for width, shared in self._groups([layer.width for layer in self._layers]):
            self._fill(width, shared)
            for layer in (layer for layers in shared for layer in layers):
                tiers = layer.tiers.get("weight", ())
                # Not by plain assignment, which would make the tier a second parameter of the layer.
                trained = ops.deciding(layer.weight, width, tiers) if tiers else None
                layer.__dict__.update(values=self._results[layer.weight.data_ptr()], trained=trained)

    def clear(self) -> None:
        """Let the layers quantise for themselves again, with scales that they find themselves."""
        self._drop_values()
        for layer in self._simulated:
            if not layer.settled:
                layer.scales = {}

    def _drop_values(self) -> None:
        for layer in self._layers:
            layer.__dict__.update(values=None, trained=None)

    @torch.no_grad()
    def _find_scales(self) -> None:
        """Those of the layers that quantise for themselves."""
        found: set[nn.Parameter] = set()
        for layer in self._simulated:
            filled = isinstance(layer, Layer) and self._fills(layer)
            if filled or layer.settled:
                continue
            layer.scales = {}
            for name, turned in layer.transposed.items() if layer.width is not None else ():
                weight: Any = layer._parameters[name]
                if type(weight) is nn.Parameter:
                    if weight not in found:
                        found.add(weight)
                        scales = ops.scales(weight.transpose(-1, -2) if turned else weight, layer.format)
                        kept = self._scales.setdefault(weight, scales)
                        if kept is not scales:
                            kept.copy_(scales)
                    layer.scales[name] = self._scales[weight]

    def _fills(self, layer: Layer) -> bool:
        weight = layer.weight
        if weight.device.type != "cuda" or type(weight) is not nn.Parameter or not weight.is_contiguous():
            return False
        return ops.quantize_backend(weight.device).__name__ == "otaro.ops.gpu"

    def _tier_widths(self, layer: Layer) -> tuple[Precision, ...]:
        return tuple(width for width, _, _ in layer.tier_places.get("weight", ()))

    def _groups(self, widths: Sequence[Precision | None]) -> list[tuple[Precision, list[list[Layer]]]]:
        """The layers that one launch serves, given each one's width; those that share a weight side by side."""
        groups: dict[tuple[Any, ...], dict[int, list[Layer]]] = {}
        for layer, width in zip(self._layers, widths, strict=True):
            if width is not None and self._fills(layer):
                alike = (width, layer.format, layer.weight.dtype, self._tier_widths(layer))
                groups.setdefault(alike, {}).setdefault(layer.weight.data_ptr(), []).append(layer)
        return [(alike[0], list(shared.values())) for alike, shared in groups.items()]

    def _key(self, first: Sequence[Layer]) -> tuple[object, ...]:
        return (first[0].format, self._tier_widths(first[0]), *(layer.weight.data_ptr() for layer in first))

    def _fill(self, width: Precision, shared: list[list[Layer]]) -> None:
        from otaro.ops import gpu

        first = [layers[0] for layers in shared]
        key = self._key(first)
        if key not in self._batches:
            weights = [layer.weight.detach() for layer in first]
            for weight in weights:
                if weight.data_ptr() not in self._results:
                    self._results[weight.data_ptr()] = torch.empty_like(weight, dtype=self.dtype or weight.dtype)
            results = [self._results[weight.data_ptr()] for weight in weights]
            tiers = [
                (tier, [layer.tiers["weight"][index][1].detach() for layer in first])
                for index, tier in enumerate(self._tier_widths(first[0]))
            ]
            self._batches[key] = gpu.prepare(weights, results, first[0].format.group_size, tiers)
        if key not in self._known and first[0].settled:
            self._batches[key].scales.copy_(torch.cat([layer.scales["weight"].flatten() for layer in first]))
            self._known.add(key)
        gpu.run(self._batches[key], width, first[0].format, sliced=True, again=key in self._known)
        self._known.add(key)
