"""Putting SEFP layers into a model: which weights they take, and switching them together.

Which weights are packed is decided by :func:`find_targets` alone: linear layers, embeddings, the output head and fused
experts. Everything else (norms, biases, convolutions, routers that are not plain linear layers) stays as it is.
Embeddings and head have a floor, a width they never go below, because they suffer first: see docs/format.md.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from otaro import ops
from otaro.errors import PrecisionError
from otaro.nn import (
    FakeSefp,
    FakeSefpConv1D,
    FakeSefpEmbedding,
    FakeSefpExperts,
    FakeSefpLinear,
    SefpEmbedding,
    SefpLinear,
    SefpWeight,
)
from otaro.precision import EMBEDDING_FLOOR, NARROWEST, WIDEST, Precision, join
from otaro.sefp import Format


class SimulatedConv1D(FakeSefpConv1D, Conv1D):  # type: ignore[misc]
    """Here because `otaro.nn` does without transformers, which takes seconds to import."""


@dataclass(frozen=True)
class Target:
    """A weight of a model that is packed. `name` is its name in the files, `parameter` its name in the model."""

    name: str
    parameter: str
    kind: Literal["linear", "embedding", "experts"]
    shape: tuple[int, ...]
    """Of the tensor as it is stored."""
    floor: Precision
    transposed: bool = False

    @property
    def module(self) -> str:
        """The module that owns the parameter."""
        return self.parameter.rpartition(".")[0]

    def stored_weight(self, weight: Tensor) -> Tensor:
        """The model's tensor as it is stored."""
        return weight.transpose(-1, -2).contiguous() if self.transposed else weight


def find_targets(model: nn.Module, embedding_floor: Precision = EMBEDDING_FLOOR) -> dict[str, Target]:
    """Every weight to be packed, by its parameter name. A tied weight appears once, under the name it is stored by."""
    find_head = getattr(model, "get_output_embeddings", None)
    head = None if find_head is None else find_head()
    tied = getattr(model, "all_tied_weights_keys", {})
    targets = {}
    for path, module in model.named_modules():
        parameter = f"{path}.weight" if path else "weight"
        if isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, FakeSefpLinear.forward):
            floor = embedding_floor if module is head else NARROWEST
            found = [Target(path, parameter, "linear", tuple(module.weight.shape), floor)]
        elif isinstance(module, FakeSefpConv1D) or type(module) is Conv1D:
            shape = tuple(module.weight.shape)[::-1]
            found = [Target(path, parameter, "linear", shape, NARROWEST, transposed=True)]
        elif isinstance(module, nn.Embedding) and _is_plain(module):
            found = [Target(path, parameter, "embedding", tuple(module.weight.shape), embedding_floor)]
        else:
            found = list(_fused_experts(path, module))
        for target in found:
            if target.parameter not in tied:
                targets[target.parameter] = target
    return targets


def _tied_target(model: nn.Module, parameter: str, shape: tuple[int, ...], floor: Precision) -> Target:
    """A weight that is another one's: most often the head's, which is that of the embedding."""
    path = parameter.removesuffix(".weight")
    is_embedding = isinstance(model.get_submodule(path), nn.Embedding)
    return Target(path, parameter, "embedding" if is_embedding else "linear", shape, floor)


def _is_plain(module: nn.Embedding) -> bool:
    """A look-up, or a look-up times a constant."""
    return type(module).forward in (nn.Embedding.forward, FakeSefpEmbedding.forward) or _scale(module) is not None


def _scale(module: nn.Embedding) -> float | None:
    """The constant that some models' embeddings multiply by, known under two names."""
    if isinstance(module, FakeSefpEmbedding):
        return module.scale
    for name in ("scalar_embed_scale", "embed_scale"):
        scale = getattr(module, name, None)
        if isinstance(scale, float | int):
            return float(scale)
    return None


def _fused_experts(path: str, module: nn.Module) -> Iterator[Target]:
    # transformers marks the classes that can loop over single experts so; others use their stacks as a whole.
    transposed = getattr(module, "is_transposed", None)
    if "Experts" not in type(module).__name__ or transposed is None:
        return
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() == 3:
            shape = tuple(parameter.transpose(-1, -2).shape) if transposed else tuple(parameter.shape)
            full = f"{path}.{name}"
            yield Target(full, full, "experts", shape, NARROWEST, transposed)


def packed_layer(
    model: nn.Module, target: Target, format: Format, stored: Precision, tied_to: SefpWeight | None = None
) -> SefpWeight:
    """The packed layer that takes the place of a target, its planes not loaded yet; put it in with `replace`."""
    module = model.get_submodule(target.module)
    original = cast(Tensor, model.get_parameter(target.parameter))
    common: dict[str, Any] = {
        "floor": target.floor,
        "tied_to": tied_to,
        "dtype": original.dtype,
        "device": original.device,
    }
    if target.kind == "linear":
        return SefpLinear(target.shape, format, stored, bias=getattr(module, "bias", None) is not None, **common)
    if isinstance(module, nn.Embedding):
        return SefpEmbedding(
            target.shape, format, stored, scale=_scale(module), padding_idx=module.padding_idx, **common
        )
    return SefpWeight(target.shape, format, stored, transposed=target.transposed, **common)


def replace(model: nn.Module, target: Target, layer: SefpWeight) -> None:
    """Put a packed layer in its target's place; a bias is kept."""
    module = model.get_submodule(target.module)
    if target.kind == "experts":
        name = target.parameter.rpartition(".")[2]
        del module._parameters[name]
        module.add_module(name, layer)
        return
    if isinstance(layer, SefpLinear) and isinstance(module, nn.Linear | Conv1D):
        layer.bias = module.bias
    model.set_submodule(target.module, layer)


def tie(model: nn.Module, targets: Mapping[str, Target]) -> None:
    """Replace the layers tied to packed weights by packed layers that read the same planes."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    for name, source_name in list(tied.items()):
        if source_name in targets:
            source = cast(SefpWeight, model.get_submodule(targets[source_name].name))
            target = _tied_target(model, name, source.shape, source.floor)
            layer = packed_layer(model, target, source.format, source.stored, tied_to=source)
            replace(model, target, layer)
            del tied[name]


def simulate(
    model: nn.Module,
    format: Format,
    embedding_floor: Precision = EMBEDDING_FLOOR,
    scales: Mapping[str, Tensor] | None = None,
) -> None:
    """Turn a model's layers into simulated ones, in place; parameters, names and ties stay as they are.

    `scales` are those of weights by their names, where they are settled.
    """
    experts: dict[str, dict[str, bool]] = {}
    found = find_targets(model, embedding_floor)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    same = [
        _tied_target(model, name, found[source].shape, found[source].floor)
        for name, source in tied.items()
        if source in found
    ]
    for target in (*found.values(), *same):
        module = model.get_submodule(target.module)
        if target.kind == "experts":
            experts.setdefault(target.module, {})[target.parameter.rpartition(".")[2]] = target.transposed
            continue
        if isinstance(module, nn.Embedding):
            module.scale = _scale(module)  # type: ignore[assignment]
        if target.transposed:
            module.__class__ = SimulatedConv1D
        else:
            module.__class__ = FakeSefpLinear if target.kind == "linear" else FakeSefpEmbedding
        _configure(module, format, target.floor)
    for path, transposed in experts.items():
        module = model.get_submodule(path)
        module.__class__ = type(f"FakeSefp{type(module).__name__}", (FakeSefpExperts, type(module)), {})
        module.__dict__["transposed"] = transposed
        _configure(module, format, NARROWEST)

    for name, scale in (scales or {}).items():
        for shared in [name, *(other for other, source in tied.items() if source == name)]:
            path, _, parameter = shared.rpartition(".")
            layer = model.get_submodule(path)
            layer.__dict__["settled"] = True
            layer.__dict__["scales"] = {**layer.scales, parameter: scale}  # type: ignore[dict-item]


def _configure(module: nn.Module, format: Format, floor: Precision) -> None:
    module.__dict__.update(format=format, floor=floor, precision=None)


def pack(model: nn.Module, format: Format, embedding_floor: Precision = EMBEDDING_FLOOR) -> int:
    """Pack a model's weights in place, tied ones once; returns how many groups had their exponent clamped."""
    targets = find_targets(model, embedding_floor)
    clamped = 0
    for target in targets.values():
        weight = target.stored_weight(model.get_parameter(target.parameter).detach())
        planes, counts = ops.pack(weight, format)
        clamped += int(counts.sum())
        layer = packed_layer(model, target, format, NARROWEST)
        layer.load(planes)
        layer.precision = WIDEST
        replace(model, target, layer)
    tie(model, targets)
    return clamped


def sefp_layers(model: nn.Module) -> dict[str, SefpWeight | FakeSefp]:
    """Every packed or simulated layer of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SefpWeight | FakeSefp)}


def set_precision(
    model: nn.Module, precision: Precision, overrides: Mapping[str, Precision] | None = None
) -> dict[str, Precision]:
    """Set the width of every layer; `overrides` maps name patterns (``model.layers.0.*``) to others, the last one wins.

    Returns the widths as they were set. Nothing changes if one of them cannot be had or a pattern matches nothing.
    """
    layers = sefp_layers(model)
    chosen = dict.fromkeys(layers, precision)
    for pattern, other in (overrides or {}).items():
        names = fnmatch.filter(layers, pattern)
        if not names:
            raise PrecisionError(f"no layer matches {pattern!r}: layers are named like {next(iter(layers), 'none')!r}")
        chosen.update(dict.fromkeys(names, other))
    for name, layer in layers.items():
        widest = available(layer)
        if chosen[name] > widest:
            held = [width for width in Precision if width <= widest]
            raise PrecisionError(f"precision {chosen[name]} is not loaded: this model holds {join(held)}")
    for name, layer in layers.items():
        layer.precision = chosen[name]
    return chosen


def available(layer: SefpWeight | FakeSefp) -> Precision:
    """The widest precision a layer can decode."""
    if isinstance(layer, FakeSefp):
        return WIDEST
    return max(width for width in Precision if layer.format.stored(width) <= layer.stored)
