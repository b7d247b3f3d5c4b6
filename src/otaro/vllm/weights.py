"""What of a packed folder goes into which layer, and which slice of it.

Planes are cut like the matrix they stand for. A rank that holds some of the rows holds those rows of every plane, since
each row has its own codes and scales. A rank that holds some of the columns holds the same part of every row of every
plane, as long as it begins and ends with a group: 64 columns are 32 bytes of the base, 8 of a bit plane, one scale. So
merged layers (query, key and value; gate and up) are rows of planes one after the other, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from otaro import ops
from otaro.checkpoint import PackedFolder
from otaro.errors import FormatError
from otaro.packing import WIDTHS, Planes, plane_key, plane_shapes
from otaro.precision import Precision, join
from otaro.sefp import Format


def shapes_stored(shape: tuple[int, ...], format: Format, stored: Precision) -> dict[str, tuple[int, ...]]:
    """The planes that codes of a width need and their shapes, the base and the scales first."""
    return {name: plane for name, plane in plane_shapes(shape, format).items() if WIDTHS[name] <= stored}


def check_columns(columns: int, whole: int, format: Format, layer: str) -> None:
    """An error if a part of the columns does not end with a group."""
    if columns != whole and columns % format.group_size:
        raise FormatError(
            f"{layer} cannot be split over {whole // columns} processes: each would hold {columns} of {whole} columns, "
            f"which is not a multiple of the group of {format.group_size}; choose another tensor parallel size"
        )


def rows_of(plane: Tensor, rank: int, ranks: int, stacked: int = 1) -> Tensor:
    """The rows that one rank of several holds, of each of the matrices stacked in a plane."""
    parts = plane.unflatten(-2, (stacked, ranks, -1))
    return parts[..., rank, :, :].flatten(-3, -2)


def columns_of(plane: Tensor, rank: int, ranks: int) -> Tensor:
    """The columns that one rank of several holds."""
    return plane.unflatten(-1, (ranks, -1))[..., rank, :]


def chosen_precision(folder: PackedFolder, extra: Mapping[str, Any]) -> Precision:
    """The width that vLLM's `model_loader_extra_config` asks for, or the widest there is."""
    unknown = sorted(set(extra) - {"precision"})
    if unknown:
        raise FormatError(f"model_loader_extra_config has {unknown[0]!r}: a packed folder takes 'precision' alone")
    asked = extra.get("precision")
    precision = Precision(asked) if asked else folder.precisions[0] if folder.precisions else min(folder.declared)
    folder.check_headers(precision)
    return precision


def available(format: Format, loaded: Precision) -> list[Precision]:
    """The widths that can be had from what a width has loaded, the widest first."""
    stored = format.stored(loaded)
    return [precision for precision in Precision if format.stored(precision) <= stored]


def check_loaded(precision: Precision, format: Format, loaded: Precision) -> None:
    held = available(format, loaded)
    if precision not in held:
        raise FormatError(f"precision {precision} is not loaded: this engine holds {join(held)}")


@dataclass(frozen=True)
class Route:
    """Where a tensor of the folder goes: the name that vLLM's loaders know it by, and in which form."""

    name: str
    form: Literal["as it is", "planes", "experts", "values", "elsewhere"]


def routed(
    folder: PackedFolder, precision: Precision, routes: Mapping[str, Route], dtype: torch.dtype
) -> Iterator[tuple[Route, str, Tensor | Planes]]:
    """The tensors of a width's files, as (route, name, tensor); the planes of experts come together."""
    for entry, value in folder.tensors(precision):
        route = routes[entry.name]
        if route.form == "elsewhere":
            continue
        if isinstance(value, Tensor) or route.form == "experts":
            yield route, route.name, value
        elif route.form == "planes":
            for plane, tensor in value.named().items():
                yield route, plane_key(route.name, plane), tensor
        else:
            width = max(precision, entry.floor or precision)
            values = ops.dequantize(value, entry.shape[-1], width, folder.format, dtype)
            yield route, f"{route.name}.weight", values
