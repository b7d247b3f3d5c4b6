"""Tiers: weights of their own for the narrow widths while they are tuned, one set of weights in the end.

One set of weights that is tuned at many widths in turn is a compromise: a gradient at E5M3 moves weights that E5M8
would rather keep, and back. But the format leaves more freedom than that. E5M3 sees only which of its cells a weight
lies in, E5M8 where in that cell. So while they are tuned, E5M3, E5M4 and the wider widths each have weights of their
own, the tiers, and each tier is kept within the cell that the narrower one chose: what is computed at every width are
prefixes of one and the same code, just as deployed. A pass at E5M3 moves the E5M3 tier alone, freely; the wider tiers
keep their own place except where a cell they were in is given up, and then move to its border and no further.

When tuning ends, :func:`settle` makes ordinary weights of the tiers: ones whose own codes are the codes of the tiers at
every width. They are saved and packed like any others, and nothing of the tiers is left.

An update goes through its sequences at a wide width (`otaro.tune.path.TieredPath` says which), then at that of one
tier, which learns from those predictions (:class:`Turn`). The tiers take turns, in the second half of a run without
every third of an update's sequences, which is cheaper and hardly worse.

Most of what there is to learn is the same at every width, and the wide ones have every turn. So a tier also takes a
share of their gradient: the more, the more its own has in common with it before the first update (:func:`agreement`).
And where the narrower tier's cell holds a weight back, the wider tier's gradient goes to the narrower one too: the cell
is what stands in its way.

Scales come from the widest tier. Settled weights might be given others, so theirs are kept beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from otaro import ops, sefp
from otaro.errors import OtaroError
from otaro.nn import FakeSefp
from otaro.precision import WIDEST, Precision
from otaro.sefp import Format, Tiers
from otaro.tune.average import RESTS
from otaro.tune.data import IGNORED
from otaro.tune.refresh import Refresher

TIER_NAMES = tuple(f"_{width}" for width in Precision)
"""How the names of tiers end."""

MOST_SHARED = 2.0
"""A tier takes no more of the wide widths' gradient than this, beside its own."""
SHARE_DIVISOR = 8.0
NARROWEST_RATE = 1.4
"""The learning rate of the narrower of two tiers, whose cells are wider, as a multiple."""
LATER = 0.5
"""The share of a run after which tiers go through LATER_SEQUENCES of every OF_THREE of an update only."""
LATER_SEQUENCES, OF_THREE = 2, 3


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
        found = {}
        for name, weight in list(module.named_parameters(recurse=False)):
            if name not in module.transposed:
                continue
            if id(weight) not in shared:
                deciding = sorted({max(width, module.floor) for width in widths if module.floor < widest})
                shared[id(weight)] = [(width, module, f"{name}_{width}") for width in deciding]
                for _, _, tier in shared[id(weight)]:
                    module.register_parameter(tier, nn.Parameter(weight.detach().clone()))
            if shared[id(weight)]:
                found[name] = tuple(shared[id(weight)])
        module.__dict__["tier_places"] = found


class Turn:
    """Which tier has its turn in an update, and on which of the update's sequences.

    `tiers` are the narrowest first. Sequences are numbered through over micro-batches and processes, so that they are
    the same ones however an update is spread out: a batch of the update, the n-th of a process, begins with the
    sequence (n · processes + process) · batch size.
    """

    def __init__(
        self, tiers: Sequence[Precision], update: int, updates: int, batch_size: int, accelerator: Accelerator
    ) -> None:
        self._late = update >= LATER * updates
        self.width = tiers[-1 - update % len(tiers)]
        self._batch_size = batch_size
        self._accelerator = accelerator
        self.tokens = torch.zeros((), dtype=torch.int64, device=accelerator.device)
        """What there is to predict, in all micro-batches of all processes."""

    def rows(self, number: int, size: int) -> list[int]:
        """Those of the n-th micro-batch, which holds so many."""
        first = (number * self._accelerator.num_processes + self._accelerator.process_index) * self._batch_size
        return [row for row in range(size) if not self._late or (first + row) % OF_THREE < LATER_SEQUENCES]

    def count(self, batches: Sequence[Any]) -> None:
        """Learn what an update consists of."""
        for number, batch in enumerate(batches):
            predicted = (batch["labels"][:, 1:] != IGNORED).sum(-1).to(self.tokens.device)
            self.tokens += predicted[self.rows(number, len(predicted))].sum()
        self.tokens = self._accelerator.reduce(self.tokens, "sum")


def set_apart_narrowest(optimizer: torch.optim.Optimizer, model: nn.Module, tiers: Sequence[Precision]) -> None:
    """Give what the narrowest width computes with groups of parameters of its own: it comes to rest where the others
    are averaged. It is the narrowest tier of every weight, and what has no tiers.

    The narrower of two tiers also has its own learning rate. Embeddings, where a floor leaves them the wider one only,
    have not.
    """
    averaged: set[int] = set()
    faster: set[int] = set()
    for module in model.modules():
        for name, ((width, narrow), *wider) in module.tiers.items() if isinstance(module, FakeSefp) else ():
            averaged.update(id(parameter) for parameter in (module._parameters[name], *(tier for _, tier in wider)))
            if width == tiers[0] and len(tiers) > 1:
                faster.add(id(narrow))
    for group in list(optimizer.param_groups):
        resting: dict[float, list[Tensor]] = {}
        for parameter in group["params"]:
            if id(parameter) not in averaged:
                resting.setdefault(NARROWEST_RATE if id(parameter) in faster else 1.0, []).append(parameter)
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in averaged]
        given = {**group, RESTS: True}
        for rate, parameters in resting.items():
            own = {**given, "params": parameters, "lr": rate * given["lr"]}
            if group["params"]:
                optimizer.add_param_group(own)
            else:
                group.update(own)  # nothing else is left in it


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
def agreement(model: nn.Module, total: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[Precision, float]:
    """The cosine between the gradient of the tiers of each width and that of the weights they belong to.

    It is over the whole model, from passes over the same batches; widths without a gradient are left out. `total` adds
    up over processes, which may hold shards.
    """
    listed: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        if isinstance(module, FakeSefp):
            listed.update(
                {id(module._parameters[name]): (module._parameters[name], of) for name, of in module.tiers.items()}
            )
    widths = sorted({width for _, tiers in listed.values() for width, _ in tiers})
    if not widths:
        return {}
    sums = torch.zeros(len(widths), 3, device=next(iter(listed.values()))[0].device)
    for weight, tiers in listed.values():
        for width, tier in tiers:
            # An expert that no token went through has no gradient, or zeros under DDP: the same.
            given, own = (
                torch.zeros((), device=tensor.device) if tensor.grad is None else own_rows(tensor.grad, False).float()
                for tensor in (weight, tier)
            )
            products = torch.stack([(own * given).sum(), own.square().sum(), given.square().sum()])
            sums[widths.index(width)] += products.to(sums.device)
    found = zip(widths, total(sums).tolist(), strict=True)
    return {width: product / math.sqrt(own * given) for width, (product, own, given) in found if own * given != 0}


def gradient_shares(cosines: Mapping[Precision, float]) -> dict[Precision, float]:
    """What each tier takes of the wide widths' gradient, given how much its own agrees with it.

    If a tier's gradient is the common one plus an error of its own of relative size e, the cosine c is 1 / sqrt(1 + e²)
    and c / (1 - c) grows as the error falls. The divisor is from trials on two models: docs/results.md.
    """
    return {
        width: MOST_SHARED if cosine >= 1 else min(MOST_SHARED, max(0.0, cosine) / (1 - cosine) / SHARE_DIVISOR)
        for width, cosine in cosines.items()
    }


@dataclass(frozen=True)
class Measured:
    """What is measured before the first update, on its batches: the tiers' agreement, and losses by width."""

    agreement: Mapping[Precision, float]
    losses: Mapping[Precision, float]

    @cached_property
    def shares(self) -> dict[Precision, float]:
        return gradient_shares(self.agreement)

    def to_json(self) -> dict[str, dict[str, float]]:
        """By width, the widest first: in the same order before a stop and after it."""
        both = {"agreement": self.agreement, "losses": self.losses, "shares": self.shares}
        return {name: {str(width): of[width] for width in sorted(of, reverse=True)} for name, of in both.items()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Mapping[str, float]]) -> Measured:
        read = ({Precision(width): value for width, value in saved[name].items()} for name in ("agreement", "losses"))
        return cls(*read)


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
            own, given = own_rows(weight.detach(), turned), own_rows(weight.grad, turned)
            listed = [(width, own_rows(tier.detach(), turned)) for width, tier in tiers]
            gradients: Any = [own_rows(tier.grad, turned) for _, tier in tiers]  # type: ignore[arg-type]
            scale = ops.scales(own, module.format)
            for number, ((width, _), gradient) in enumerate(zip(listed, gradients, strict=True)):
                if number:
                    quantize = partial(ops.quantize_backend(own.device).quantize, own, width, module.format)
                    held = quantize(listed[number : number + 1], scale) != quantize(listed[: number + 1], scale)
                    gradients[number - 1].add_(gradient * held)
                gradient.add_(given, alpha=shares.get(width, 0.0))


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
        found = {}
        for name, tiers in layer.tiers.items():
            weight: Any = layer._parameters[name]
            if id(weight) not in scales:
                turned = layer.transposed[name]
                own, *theirs = (own_rows(tensor, turned) for tensor in (weight, *(tier for _, tier in tiers)))
                listed = [(width, tier) for (width, _), tier in zip(tiers, theirs, strict=True)]
                result, scale, moved = settle(own.contiguous(), layer.format, listed)
                own.copy_(result)
                scales[id(weight)] = all_rows(scale, weight)
                lost += moved
            found[name] = scales[id(weight)]
        if found:
            layer.__dict__.update(scales=found, settled=True)
    for layer in layers:
        for places in layer.tier_places.values():
            for _, owner, tier in places:
                if not isinstance(owner._parameters.get(tier), DTensor):
                    owner._parameters.pop(tier, None)
        layer.__dict__["tier_places"] = {}
    return lost


def own_rows(weight: Tensor, turned: bool) -> Tensor:
    """What this process holds of a weight, its groups along the last dimension."""
    own: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return own.transpose(-1, -2) if turned else own


def all_rows(own: Tensor, weight: Tensor) -> Tensor:
    """What all processes together have for the rows of a weight, each for those that it holds."""
    if not isinstance(weight, DTensor):
        return own
    shape = torch.Size((weight.shape[0], *own.shape[1:]))
    stride = own.contiguous().stride()
    whole = DTensor.from_local(
        own.contiguous(), weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
    )
    return whole.full_tensor()


def without_tiers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's state less the tiers in it."""
    return {name: value for name, value in state.items() if not name.endswith(TIER_NAMES)}


def settle(weight: Tensor, format: Format, tiers: Tiers) -> tuple[Tensor, Tensor, int]:
    """Weights with the codes of the tiers at every width, their scales, and the number of groups that lost a bit."""
    backend, _ = ops.codec(weight.device)
    scale = backend.scales(weight, format)
    wanted, alone = (backend.quantize(weight, WIDEST, format, given, scale) for given in (tiers, ()))
    # A weight beyond the range has the outermost code without lying in its cell.
    step = sefp.step(scale, WIDEST).abs()[..., None]
    near = (sefp.in_groups((weight - wanted).abs(), format.group_size) <= step).flatten(-2)[..., : weight.shape[-1]]
    settled = torch.where(near & (wanted == alone), weight, wanted)
    lost = sefp.in_groups(backend.quantize(settled, WIDEST, format, (), scale) != wanted, format.group_size).any(-1)
    return settled, scale, int(lost.sum())
