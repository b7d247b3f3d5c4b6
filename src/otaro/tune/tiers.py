"""Tiers: weights of their own for the narrow widths while they are tuned, one set of weights in the end.

One set of weights that is tuned at many widths in turn is a compromise: a gradient at E5M3 moves weights that E5M8
would rather keep, and back. But the format leaves more freedom than that. E5M3 sees only which of its cells a weight
lies in, E5M8 where in that cell. So while they are tuned, E5M3, E5M4 and the wider widths each have weights of their
own, the tiers, and each tier is kept within the cell that the narrower one chose: what is computed at every width are
prefixes of one and the same code, just as deployed. A pass at E5M3 moves the E5M3 tier alone, freely; the wider tiers
keep their own place except where a cell they were in is given up, and then move to its border and no further.

When tuning ends, :func:`settle` makes ordinary weights of the tiers: ones whose own codes are the codes of the tiers at
every width. They are saved and packed like any others, and nothing of the tiers is left.

An update goes through its sequences at a wide width, then at that of one tier, which learns from those predictions
(`otaro.tune.update`); the tiers take turns (`otaro.tune.selector.WideSelector`).

Most of what there is to learn is the same at every width, and the wide ones have every turn. So a tier also takes a
share of their gradient: the more, the more its own has in common with it before the first update
(`otaro.tune.measurement`). And where the narrower tier's cell holds a weight back, the wider tier's gradient is
released to the narrower one too: the cell is what stands in its way.

Scales come from the widest tier. Settled weights might be given others, so theirs are kept beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from otaro import ops, sefp
from otaro.errors import OtaroError
from otaro.nn import FakeSefp
from otaro.precision import WIDEST, Precision
from otaro.refresh import Refresher
from otaro.sefp import Format, Tiers
from otaro.tune.average import UNAVERAGED

TIER_NAMES = tuple(f"_{width}" for width in Precision)
"""How the names of tiers end."""


def add_tiers(model: nn.Module, widths: Sequence[Precision], widest: Precision = WIDEST) -> None:
    """Give the simulated layers of a model tiers at these widths, equal to their weights at first.

    They are parameters beside the weight, ``weight_E5M3``, so that they are trained, saved and restored like it. A
    weight that several layers share has tiers that they share. `widest` is the widest width that is tuned: its bits the
    weight itself decides.
    """
    if any(width >= widest for width in widths):
        raise OtaroError(f"the tier of {widest} is the weight itself: name narrower widths")
    shared: dict[int, list[tuple[Precision, nn.Module, str]]] = {}
    for module in model.modules():
        if not isinstance(module, FakeSefp):
            continue
        if module.format.scheme != "nested":
            raise OtaroError(f"tiers need the scheme 'nested', whose widths are prefixes, not {module.format.scheme!r}")
        places = {}
        for name, weight in list(module.named_parameters(recurse=False)):
            if name not in module.transposed:
                continue
            if id(weight) not in shared:
                deciding = sorted({max(width, module.floor) for width in widths if module.floor < widest})
                shared[id(weight)] = [(width, module, f"{name}_{width}") for width in deciding]
                for _, _, tier in shared[id(weight)]:
                    module.register_parameter(tier, nn.Parameter(weight.detach().clone()))
            if shared[id(weight)]:
                places[name] = tuple(shared[id(weight)])
        module.__dict__["tier_places"] = places


def set_apart_narrowest(
    optimizer: torch.optim.Optimizer, model: nn.Module, tiers: Sequence[Precision], rate: float
) -> None:
    """Give what the narrowest width computes with groups of parameters of its own, which are not averaged: the
    narrowest tier of every weight, and what has no tiers.

    The narrower of two tiers also has its own learning rate, `rate` times the others'. Embeddings, where a floor leaves
    them the wider one only, have not.
    """
    averaged: set[int] = set()
    faster: set[int] = set()
    for module in model.modules():
        for name, ((width, narrow), *wider) in module.tiers.items() if isinstance(module, FakeSefp) else ():
            averaged.update(id(parameter) for parameter in (module._parameters[name], *(tier for _, tier in wider)))
            if width == tiers[0] and len(tiers) > 1:
                faster.add(id(narrow))
    for group in list(optimizer.param_groups):
        unaveraged: dict[float, list[Tensor]] = {}
        for parameter in group["params"]:
            if id(parameter) not in averaged:
                unaveraged.setdefault(rate if id(parameter) in faster else 1.0, []).append(parameter)
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in averaged]
        options = {**group, UNAVERAGED: True}
        for multiple, parameters in unaveraged.items():
            new = {**options, "params": parameters, "lr": multiple * options["lr"]}
            if group["params"]:
                optimizer.add_param_group(new)
            else:
                group.update(new)  # nothing else is left in it


def has_tiers(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer trains a model's tiers."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: parameter for name, parameter in model.named_parameters() if name.endswith(TIER_NAMES)}
    return all(id(parameter) in trained for parameter in named.values())


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Average gradients over all processes; one that used a weight in no pass takes part with zeros."""
    waiting = []
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.div_(distributed.get_world_size())
        waiting.append(distributed.all_reduce(parameter.grad, async_op=True))
    for work in waiting:
        work.wait()


@torch.no_grad()
def share_gradients(model: nn.Module, shares: Mapping[Precision, float], refresher: Refresher | None = None) -> None:
    """Once an update's passes are done, give the tiers gradients beside their own: shares of that of the weight they
    belong to, and to the narrower of two the wider one's where the narrower one's cell holds it back."""
    layers = [module for module in model.modules() if isinstance(module, FakeSefp)]
    for module in layers:
        for name, tiers in module.tiers.items():
            for _, tier in tiers:
                weight: Any = module._parameters[name]
                if tier.grad is None and weight.grad is not None:
                    tier.grad = torch.zeros_like(tier)  # it had no turn in this update
    if refresher is not None and refresher.share(shares):
        return
    seen: set[int] = set()
    for module in layers:
        for name, tiers in module.tiers.items():
            weight = module._parameters[name]
            if id(weight) in seen or weight.grad is None:
                continue
            seen.add(id(weight))
            turned = module.transposed[name]
            rows, wide = local_rows(weight.detach(), turned), local_rows(weight.grad, turned)
            listed = [(width, local_rows(tier.detach(), turned)) for width, tier in tiers]
            gradients: Any = [local_rows(tier.grad, turned) for _, tier in tiers]  # type: ignore[arg-type]
            scale = ops.scales(rows, module.format)
            for number, ((width, _), gradient) in enumerate(zip(listed, gradients, strict=True)):
                if number:
                    quantize = partial(ops.quantize_backend(rows.device).quantize, rows, width, module.format)
                    held = quantize(listed[number : number + 1], scale) != quantize(listed[: number + 1], scale)
                    gradients[number - 1].add_(gradient * held)
                gradient.add_(wide, alpha=shares.get(width, 0.0))


@torch.no_grad()
def settle_model(model: nn.Module) -> int:
    """Make ordinary weights of a model's tiers, in place, with their scales beside them in the layers' `scales`;
    returns how many groups did not keep a tier's bits, which is none.

    Of sharded weights a process settles its own rows and counts their groups. Their tiers stay where they are, since
    what shards them would put them back: :func:`without_tiers` leaves them out of what is saved.
    """
    lost = 0
    scales: dict[int, Tensor] = {}
    layers = [module for module in model.modules() if isinstance(module, FakeSefp)]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for layer in layers:
        known = {}
        for name, tiers in layer.tiers.items():
            weight: Any = layer._parameters[name]
            if id(weight) not in scales:
                turned = layer.transposed[name]
                rows = local_rows(weight, turned)
                listed = [(width, local_rows(tier, turned)) for width, tier in tiers]
                result, scale, moved = settle(rows.contiguous(), layer.format, listed)
                rows.copy_(result)
                scales[id(weight)] = all_rows(scale, weight)
                lost += moved
            known[name] = scales[id(weight)]
        if known:
            layer.__dict__.update(scales=known, settled=True)
    for layer in layers:
        for places in layer.tier_places.values():
            for _, owner, tier in places:
                if not isinstance(owner._parameters.get(tier), DTensor):
                    owner._parameters.pop(tier, None)
        layer.__dict__["tier_places"] = {}
    return lost


def local_rows(weight: Tensor, turned: bool) -> Tensor:
    """What this process holds of a weight, its groups along the last dimension."""
    local: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return local.transpose(-1, -2) if turned else local


def all_rows(local: Tensor, weight: Tensor) -> Tensor:
    """What all processes together have for the rows of a weight, each for those that it holds."""
    if not isinstance(weight, DTensor):
        return local
    shape = torch.Size((weight.shape[0], *local.shape[1:]))
    stride = local.contiguous().stride()
    whole = DTensor.from_local(
        local.contiguous(), weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
    )
    return whole.full_tensor()


def without_tiers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's state less the tiers in it."""
    return {name: value for name, value in state.items() if not name.endswith(TIER_NAMES)}


def settle(weight: Tensor, format: Format, tiers: Tiers) -> tuple[Tensor, Tensor, int]:
    """Weights with the codes of the tiers at every width, their scales, and the number of groups that lost a bit."""
    backend, _ = ops.codec(weight.device)
    scale = backend.scales(weight, format)
    wanted, alone = (backend.quantize(weight, WIDEST, format, within, scale) for within in (tiers, ()))
    # A weight beyond the range has the outermost code without lying in its cell.
    step = sefp.step(scale, WIDEST).abs()[..., None]
    near = (sefp.in_groups((weight - wanted).abs(), format.group_size) <= step).flatten(-2)[..., : weight.shape[-1]]
    settled = torch.where(near & (wanted == alone), weight, wanted)
    lost = sefp.in_groups(backend.quantize(settled, WIDEST, format, (), scale) != wanted, format.group_size).any(-1)
    return settled, scale, int(lost.sum())
