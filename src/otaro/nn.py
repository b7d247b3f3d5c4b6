"""Layers whose weights are SEFP: packed ones for running, simulated ones for tuning.

Running: :class:`SefpWeight` holds the planes of one tensor as buffers, in the layout of the files, and a precision.
:class:`SefpLinear` and :class:`SefpEmbedding` are layers around it; the fused 3-D experts of a mixture-of-experts
model become a bare `SefpWeight` that decodes one expert at a time when it is indexed. Switching the precision changes
one attribute: no weight is copied, planes beyond the width are simply not read. On GPUs with kernels for it the planes
are re-laid in fragment order when they are first used (`arranged`), and back when they are asked for, saved or moved.

Tuning: :class:`FakeSefpLinear`, :class:`FakeSefpEmbedding` and :class:`FakeSefpExperts` keep the ordinary parameters
and pass them through the format on their way into the product; gradients go straight through.

:mod:`otaro.convert` puts these layers into a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from otaro import ops
from otaro.errors import PrecisionError
from otaro.ops.cuda.layout import Fragments, fragments, to_planes
from otaro.packing import BASE, BITS, WIDTHS, Planes, plane_shapes
from otaro.precision import NARROWEST, Precision
from otaro.sefp import Format, Tiers


class SefpWeight(nn.Module):
    """One tensor in SEFP, decoded when it is used: at `width`, which is the `precision` asked for or the floor.

    `shape` is the tensor's own, groups running along its last dimension; `transposed` says that the model sees the last
    two dimensions swapped. `stored` is how many planes to declare; :meth:`attach` adds more. A weight `tied_to` another
    has no planes of its own but reads the other's, at its own precision.
    """

    tied_to: SefpWeight | None
    values_like: Tensor
    arranged: bool = False
    """The buffers hold the planes in fragment order."""

    def __init__(
        self,
        shape: tuple[int, ...],
        format: Format,
        stored: Precision,
        *,
        floor: Precision = NARROWEST,
        transposed: bool = False,
        tied_to: SefpWeight | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        # Not a submodule: it has its own place in the model and must not be saved or moved twice.
        self.__dict__["tied_to"] = tied_to
        self.shape = shape
        self.format = format
        self.floor = floor
        self.transposed = transposed
        self._precision = NARROWEST if tied_to is None else tied_to.precision
        # Follows .to(dtype), so that values are decoded in the type the model computes in.
        self.register_buffer("values_like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        if tied_to is not None:
            return
        for name, plane in plane_shapes(shape, format).items():
            if WIDTHS[name] <= stored:
                self.register_buffer(name, torch.empty(plane, dtype=torch.uint8, device=device))

    @property
    def planes(self) -> Planes:
        """The planes as they lie in files."""
        if self.tied_to is not None:
            return self.tied_to.planes
        return to_planes(self._fragments, self.format) if self.arranged else self._held

    @property
    def resident(self) -> Planes | Fragments:
        """The planes as the device at hand computes with them."""
        if self.tied_to is not None:
            return self.tied_to.resident
        # Not while a graph is recorded: then they are used as they are.
        if not self.arranged and not torch.compiler.is_compiling():
            self.arrange()
        return self._fragments if self.arranged else self._held

    def arrange(self) -> None:
        """Lay the planes in fragment order, one after the other, where the device has kernels for it."""
        base = cast(Tensor, self._buffers.get(BASE, self.values_like))
        if self.tied_to is not None or self.arranged or not ops.arranges(base.device, self.format):
            return
        for name, plane in self._held.named().items():
            self._buffers[name] = fragments(name, plane, self.format)
        self.arranged = True

    def _restore(self) -> None:
        """Lay the planes as in files again."""
        if self.arranged:
            self.load(self.planes)

    @property
    def _held(self) -> Planes:
        return Planes.from_named(cast(dict[str, Tensor], self._buffers))

    @property
    def _fragments(self) -> Fragments:
        held = self._held
        return Fragments(held.base, held.bits, held.scale, self.shape, self.format.group_size)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._restore()
        return cast(Self, super()._apply(*args, **kwargs))  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.arranged:
            destination.update({prefix + name: plane for name, plane in self.planes.named().items()})

    def _load_from_state_dict(self, *args: Any) -> None:
        self._restore()
        super()._load_from_state_dict(*args)

    @property
    def stored(self) -> Precision:
        """The widest code whose bits are all here."""
        return self._held.stored if self.tied_to is None else self.tied_to.stored

    @property
    def precision(self) -> Precision:
        """The width asked for."""
        return self._precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        if self.format.stored(max(precision, self.floor)) > self.stored:
            raise PrecisionError(
                f"precision {precision} is not loaded: load the model with precision={str(precision)!r} first"
            )
        self._precision = precision

    @property
    def width(self) -> Precision:
        """The width in use: the one asked for, or the floor."""
        return max(self._precision, self.floor)

    def load(self, planes: Planes) -> None:
        """Take over these planes, without a copy."""
        for name, plane in planes.named().items():
            self.register_buffer(name, plane)
        self.arranged = False

    def attach(self, bit: int, plane: Tensor) -> None:
        """Add the plane of one more bit, or replace it."""
        self.register_buffer(BITS[bit], fragments(BITS[bit], plane, self.format) if self.arranged else plane)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values at the width in use, shaped as the model sees them."""
        values = ops.dequantize(self.resident, self.shape[-1], self.width, self.format, dtype or self.values_like.dtype)
        return values.transpose(-1, -2) if self.transposed else values

    def __getitem__(self, index: int | Tensor) -> Tensor:
        """One matrix of a stack of them: an expert."""
        planes = self.resident
        rows = self.shape[-2]
        stack = planes
        if isinstance(planes, Planes):
            stack = Planes.from_named({name: plane.flatten(0, -2) for name, plane in planes.named().items()})
        ids = torch.arange(rows, device=planes.base.device) + index * rows
        values = ops.embedding(ids, stack, self.shape[-1], self.width, self.format, self.values_like.dtype)
        return values.transpose(-1, -2) if self.transposed else values

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, {self.format.scheme}, width={self.width}, stored={self.stored}"


class SefpLinear(SefpWeight):
    """A linear layer with packed weights; `bias` stays in the model's type."""

    def __init__(
        self, shape: tuple[int, ...], format: Format, stored: Precision, *, bias: bool = False, **options: Any
    ):
        super().__init__(shape, format, stored, **options)
        self.out_features, self.in_features = shape
        self.bias = nn.Parameter(torch.empty_like(self.values_like).new_empty(shape[0])) if bias else None

    @property
    def weight(self) -> Tensor:
        """The weight at the width in use, decoded anew at each access."""
        return self.dequantize()

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.resident, self.in_features, self.width, self.format, self.bias)


class SefpEmbedding(SefpWeight):
    """An embedding with packed rows; only the rows looked up are decoded."""

    def __init__(
        self,
        shape: tuple[int, ...],
        format: Format,
        stored: Precision,
        *,
        scale: float | None = None,
        padding_idx: int | None = None,
        **options: Any,
    ):
        super().__init__(shape, format, stored, **options)
        self.num_embeddings, self.embedding_dim = shape
        self.scale = scale
        self.padding_idx = padding_idx

    @property
    def weight(self) -> Tensor:
        """The whole table at the width in use, decoded anew at each access."""
        return self.dequantize()

    def forward(self, ids: Tensor) -> Tensor:
        values = ops.embedding(ids, self.resident, self.embedding_dim, self.width, self.format, self.values_like.dtype)
        return values if self.scale is None else values * torch.tensor(self.scale, dtype=values.dtype)


class FakeSefp(nn.Module):
    """What the simulated layers share: the format, and the precision asked for (None: the weights as they are)."""

    format: Format = Format()
    floor: Precision = NARROWEST
    precision: Precision | None = None
    values: Tensor | None = None
    """The weight's values made beforehand, to be used as they are: see `otaro.refresh`."""
    trained: Tensor | None = None
    """What the gradient of `values` goes to, if not the weight."""
    transposed: Mapping[str, bool] = MappingProxyType({"weight": False})
    """The weights concerned, and whether each is stored transposed."""
    scales: Mapping[str, Tensor] = MappingProxyType({})
    """The scales of weights by their names, where they are known and need not be found."""
    settled: bool = False
    """The scales stay: the weights are those that tuning ended with."""
    tier_places: Mapping[str, Sequence[tuple[Precision, nn.Module, str]]] = MappingProxyType({})
    """Where the tiers of each weight lie, by its name: width, module and the name there. See `otaro.tune.tiers`."""

    @property
    def tiers(self) -> dict[str, Tiers]:
        """For each weight by its name the tiers that decide its narrow widths."""
        # Looked up each time: sharding puts another tensor in their place for every pass.
        return {
            weight: [(width, cast(Tensor, module._parameters[name])) for width, module, name in places]
            for weight, places in self.tier_places.items()
        }

    @property
    def width(self) -> Precision | None:
        """The width in use: the one asked for, or the floor."""
        return None if self.precision is None else max(self.precision, self.floor)

    def simulate(
        self, weight: Tensor, name: str = "weight", pick: Callable[[Tensor], Tensor] = lambda whole: whole
    ) -> Tensor:
        """The weight of that name as the packed layer would have it, or what is picked of its rows."""
        # Asked first: a compiled layer that never looks at the width is compiled once for all of them.
        if self.values is not None:
            return pick(ops.straight_through(weight if self.trained is None else self.trained, self.values))
        precision = self.width
        if precision is None:
            return pick(weight)
        turned = self.transposed[name]

        def in_rows(tensor: Tensor) -> Tensor:
            return pick(tensor).transpose(-1, -2) if turned else pick(tensor)

        tiers = [(width, in_rows(tier)) for width, tier in self.tiers.get(name, ())]
        scale = pick(self.scales[name]) if name in self.scales else None
        values = ops.fake_quantize(in_rows(weight), precision, self.format, tiers, scale)
        return values.transpose(-1, -2) if turned else values


class FakeSefpLinear(FakeSefp, nn.Linear):
    """A linear layer that computes with its weight's SEFP values and trains the weight itself."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.simulate(self.weight), self.bias)


class FakeSefpConv1D(FakeSefp):
    """Mixed into transformers' Conv1D, GPT-2's linear layer, whose weight is stored transposed."""

    transposed = MappingProxyType({"weight": True})
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.simulate(self.weight).transpose(0, 1), self.bias)


class FakeSefpEmbedding(FakeSefp, nn.Embedding):
    """An embedding that looks up SEFP values and trains the table itself."""

    scale: float | None = None

    def forward(self, ids: Tensor) -> Tensor:
        # Rows are quantised one by one, so those that are looked up are enough.
        values = self.simulate(self.weight, pick=lambda table: functional.embedding(ids, table, self.padding_idx))
        # Not a view of what the gradient goes through: some models scale embeddings in place.
        return values.clone() if self.scale is None else values * torch.tensor(self.scale, dtype=values.dtype)


class FakeSefpExperts(FakeSefp):
    """Mixed into a model's own experts class: its 3-D parameters read as SEFP values while it computes."""

    _values: dict[str, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        values = self.__dict__.get("_values")
        if values is None or name not in self.transposed:
            return value
        if name not in values:
            values[name] = self.simulate(cast(Tensor, value), name)
        return values[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._values = {}
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._values = None
