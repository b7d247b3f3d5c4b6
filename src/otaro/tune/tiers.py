"""Tiers: weights of their own for the narrow widths while they are fitted, one set of weights in the end.

docs/method.md has the idea. Each tier is kept within the cell that the narrower one chose, so what is computed at every
width are prefixes of one code. Tiers are equal to their weights at first, `otaro.tune.fitting` moves them, and in the
end :func:`settle` makes weights whose own codes are those of the tiers. Their scales are kept beside them, since
settled weights might be given others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from otaro import ops, sefp
from otaro.errors import OtaroError
from otaro.nn import FakeSefp
from otaro.precision import WIDEST, Precision
from otaro.sefp import Format, Tiers

TIER_NAMES = tuple(f"_{width}" for width in Precision)
"""How the names of tiers end."""


def simulated(model: nn.Module) -> Iterator[FakeSefp]:
    """The layers of a model that go through the format."""
    return (module for module in model.modules() if isinstance(module, FakeSefp))


def check_tiers(format: Format, widths: Sequence[Precision]) -> None:
    """Refuse tiers that a format cannot have."""
    if WIDEST in widths:
        raise OtaroError(f"the tier of {WIDEST} is the weight itself: name narrower widths")
    if format.scheme != "nested":
        raise OtaroError(f"tiers need the scheme 'nested', whose widths are prefixes, not {format.scheme!r}")


def add_tiers(model: nn.Module, widths: Sequence[Precision]) -> None:
    """Give the simulated layers of a model tiers at these widths, equal to their weights at first.

    They are parameters beside the weight, ``weight_E5M3``. Layers that share a weight share its tiers.
    """
    shared: dict[int, list[tuple[Precision, nn.Module, str]]] = {}
    for module in simulated(model):
        check_tiers(module.format, widths)
        places = {}
        for name, weight in list(module.named_parameters(recurse=False)):
            if name not in module.transposed:
                continue
            if id(weight) not in shared:
                deciding = sorted({max(width, module.floor) for width in widths if module.floor < WIDEST})
                shared[id(weight)] = [(width, module, f"{name}_{width}") for width in deciding]
                for _, _, tier in shared[id(weight)]:
                    module.register_parameter(tier, nn.Parameter(weight.detach().clone()))
            if shared[id(weight)]:
                places[name] = tuple(shared[id(weight)])
        module.__dict__["tier_places"] = places


def tiers_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """All tiers of a model by their names."""
    return {name: parameter for name, parameter in model.named_parameters() if name.endswith(TIER_NAMES)}


@torch.no_grad()
def start_tiers(model: nn.Module) -> None:
    """Make tiers equal to their weights again."""
    for module in simulated(model):
        for name, tiers in module.tiers.items():
            for _, tier in tiers:
                tier.copy_(cast(Tensor, module._parameters[name]))


@torch.no_grad()
def hold_scales(model: nn.Module) -> None:
    """Find the scales of all weights that have tiers, once: weights stay as they are from now on."""
    found: dict[int, Tensor] = {}
    for module in simulated(model):
        known = {}
        for name in module.tiers:
            weight: Any = module._parameters[name]
            if isinstance(weight, DTensor):
                continue  # whole for a pass only: found then
            if id(weight) not in found:
                found[id(weight)] = ops.scales(local_rows(weight, module.transposed[name]), module.format)
            known[name] = found[id(weight)]
        if known:
            module.__dict__.update(scales=known, settled=True)


def leave_out_tiers(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let an optimizer train the weights only: tiers are moved by `otaro.tune.fitting`."""
    tiers = {id(tier) for tier in tiers_of(model).values()}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in tiers]


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average gradients over all processes; one that used a weight in no pass takes part with zeros."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        distributed.all_reduce(parameter.grad.div_(distributed.get_world_size()))


@torch.no_grad()
def settle_model(model: nn.Module) -> int:
    """Make ordinary weights of a model's tiers, in place, with their scales beside them in the layers' `scales`;
    returns how many groups did not keep a tier's bits, which is none.

    Of sharded weights a process settles its own rows and counts their groups. Their tiers stay where they are, since
    what shards them would put them back: :func:`without_tiers` leaves them out of what is saved.
    """
    lost = 0
    scales: dict[int, Tensor] = {}
    reshard(model)
    for layer in simulated(model):
        known = {}
        for name, tiers in layer.tiers.items():
            weight: Any = layer._parameters[name]
            if id(weight) not in scales:
                turned = layer.transposed[name]
                rows = local_rows(weight, turned)
                listed = [(width, local_rows(tier, turned)) for width, tier in tiers]
                result, scale, moved = settle(rows.contiguous(), layer.format, listed, layer.scales.get(name))
                rows.copy_(result)
                scales[id(weight)] = all_rows(scale, weight)
                lost += moved
            known[name] = scales[id(weight)]
        if known:
            layer.__dict__.update(scales=known, settled=True)
    drop_tiers(model, settled=True)
    return lost


def drop_tiers(model: nn.Module, *, settled: bool = False) -> None:
    """Leave a model without tiers, but for sharded ones, which it only no longer computes with.

    Unless they were settled, scales are found as usual again.
    """
    for layer in simulated(model):
        if not settled:
            layer.__dict__.update(scales={}, settled=False)
        for places in layer.tier_places.values():
            for _, owner, tier in places:
                if not isinstance(owner._parameters.get(tier), DTensor):
                    owner._parameters.pop(tier, None)
        layer.__dict__["tier_places"] = {}


def reshard(model: nn.Module) -> None:
    """Give up weights that FSDP gathered for a pass and keeps for the backward one, where none follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(weight: Tensor, turned: bool) -> Tensor:
    """What this process holds of a weight, its groups along the last dimension."""
    return local(weight).transpose(-1, -2) if turned else local(weight)


def all_rows(own: Tensor, weight: Tensor) -> Tensor:
    """What all processes together have for the rows of a weight, each for those that it holds."""
    if not isinstance(weight, DTensor):
        return own
    own = own.contiguous()
    shape, place = torch.Size((weight.shape[0], *own.shape[1:])), (weight.device_mesh, weight.placements)
    return DTensor.from_local(own, *place, run_check=False, shape=shape, stride=own.stride()).full_tensor()


def without_tiers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's state less the tiers in it."""
    return {name: value for name, value in state.items() if not name.endswith(TIER_NAMES)}


def settle(weight: Tensor, format: Format, tiers: Tiers, scale: Tensor | None = None) -> tuple[Tensor, Tensor, int]:
    """Weights with the codes of the tiers at every width, their scales, and the number of groups that lost a bit."""
    backend, _ = ops.codec(weight.device)
    scale = backend.scales(weight, format) if scale is None else scale
    wanted, alone = (backend.quantize(weight, WIDEST, format, within, scale) for within in (tiers, ()))
    # A weight beyond the range has the outermost code without lying in its cell.
    step = sefp.step(scale, WIDEST).abs()[..., None]
    near = (sefp.in_groups((weight - wanted).abs(), format.group_size) <= step).flatten(-2)[..., : weight.shape[-1]]
    settled = torch.where(near & (wanted == alone), weight, wanted)
    lost = sefp.in_groups(backend.quantize(settled, WIDEST, format, (), scale) != wanted, format.group_size).any(-1)
    return settled, scale, int(lost.sum())
