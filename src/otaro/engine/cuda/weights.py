"""A packed folder's weights on a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otaro.checkpoint.folder import PackedFolder
from otaro.engine.architecture import (
    EXPERT_TYPES,
    MODEL_TYPES,
    UnsupportedError,
    matrix_place,
    read_shape,
    vector_place,
)
from otaro.engine.cuda.matrices import Arena, PackedMatrix, Part, arena_bytes, plane_names, planes_bytes
from otaro.engine.cuda.model import DeviceModel, Experts, Layer
from otaro.engine.shape import MatrixRole, VectorRole
from otaro.engine.weights import AnyWeights
from otaro.errors import OtaroError
from otaro.ops.cuda import supports
from otaro.packing import BITS, Planes
from otaro.precision import NARROWEST, Precision
from otaro.progress import Progress

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
RESERVE = 1 << 30
"""Bytes of a GPU's memory that are left for keys and values, kernels and graphs when a width is chosen."""

_R = MatrixRole
_FUSED = (
    (_R.QUERY, _R.KEY, _R.VALUE),
    (_R.OUTPUT,),
    (_R.GATE, _R.UP),
    (_R.DOWN,),
    (_R.EXPERT_GATE_UP,),
    (_R.EXPERT_DOWN,),
)
"""Roles whose matrices are one product."""
_BIASES = {
    _R.QUERY: VectorRole.QUERY_BIAS,
    _R.KEY: VectorRole.KEY_BIAS,
    _R.VALUE: VectorRole.VALUE_BIAS,
    _R.OUTPUT: VectorRole.OUTPUT_BIAS,
    _R.GATE: VectorRole.GATE_BIAS,
    _R.UP: VectorRole.UP_BIAS,
    _R.DOWN: VectorRole.DOWN_BIAS,
}


class DeviceWeights(AnyWeights):
    """In the memory of a device, in the type `dtype` where they are not packed."""

    model: DeviceModel

    def __init__(
        self,
        folder: Path,
        precision: Precision | None = None,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._device, self._dtype = device, dtype
        self._whole: dict[tuple[int, MatrixRole], PackedMatrix] = {}
        self._parts: dict[str, Part] = {}
        self._vectors: dict[tuple[int, VectorRole], Tensor] = {}
        super().__init__(folder, precision, progress=progress)
        self.model = self._assemble()
        _settle(device)

    def _prepare(self) -> None:
        if not supports(self.folder.format):
            raise UnsupportedError(f"groups of {self.folder.format.group_size} weights do not run on GPUs")
        self._shape = read_shape(self.folder, self.config, (*MODEL_TYPES, *EXPERT_TYPES))
        if self._dtype is None:
            named = self.folder.config.get("dtype") or self.folder.config.get("torch_dtype")
            self._dtype = DTYPES.get(str(named), torch.float16) if self._device.type == "cuda" else torch.float32
        check_memory(self.folder, self.loaded, free_bytes(self._device))
        names = {place: name for name in self._shapes if (place := matrix_place(name)) is not None}
        for layer in range(self._shape.layers):
            for roles in _FUSED:
                held = [(layer, role) for role in roles if (layer, role) in names]
                if held:
                    self._add_matrix([names[place] for place in held], held)
        for role in (_R.EMBEDDING, _R.HEAD):
            if (0, role) in names:
                self._add_matrix([names[0, role]], [(0, role)])

    def _add_matrix(self, names: list[str], places: list[tuple[int, MatrixRole]]) -> None:
        shapes, gates = [self._shapes[name] for name in names], places[0][1] == _R.GATE
        if len({self._floors[name] for name in names}) > 1:
            raise UnsupportedError(f"{' and '.join(names)} have different narrowest precisions, which GPUs do not run")
        whole = PackedMatrix(shapes, self.folder.format, self._device, gates=gates)
        for name, place, part in zip(names, places, whole.parts, strict=True):
            self._parts[name], self._whole[place] = part, whole

    def _arena(self, above: Precision | None, width: Precision) -> Arena:
        return Arena(self._arena_bytes(above, width), self._device)

    def _arena_bytes(self, above: Precision | None, width: Precision) -> int:
        size = 0
        for name, floor in self._floors.items():
            part = self._parts[name]
            if part.whole.parts[0] is not part or (above is not None and floor >= width):
                continue
            planes = plane_names(width)
            if above is None:
                planes += [BITS[bit] for bit in range(NARROWEST.mantissa + 1, floor.mantissa + 1)]
            size += sum(arena_bytes(_product(part.whole.plane_shape(plane))) for plane in planes)
        return size

    def _new_matrix(self, name: str, planes: Planes, arena: Arena) -> Part:
        part = self._parts[name]
        part.set_planes(planes, arena)
        return part

    def _set_vector(self, key: str, tensor: Tensor) -> None:
        place = vector_place(key)
        assert place is not None
        self._vectors[place] = tensor.to(self._device, torch.float32)

    def _tie(self) -> None:
        if (0, _R.HEAD) not in self._whole:
            self._check_tied()
            self._whole[0, _R.HEAD] = self._whole[0, _R.EMBEDDING]

    def add(
        self,
        width: Precision,
        lock: AbstractContextManager[Any] = nullcontext(),
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        needed, free = self._arena_bytes(Precision.from_mantissa(width.mantissa - 1), width), free_bytes(self._device)
        try:
            if needed > free:
                raise torch.OutOfMemoryError
            super().add(width, lock, wanted)
        except torch.OutOfMemoryError as error:
            raise OtaroError(
                f"{width} takes {needed / 1e9:.1f} GB more of the GPU's memory, of which {free / 1e9:.1f} GB are free: "
                f"{self.loaded} stays in use"
            ) from error
        finally:
            with lock:
                _settle(self._device)

    def drop_to(self, precision: Precision) -> None:
        super().drop_to(precision)
        self.model.dropped(precision)
        _settle(self._device)

    def _assemble(self) -> DeviceModel:
        assert self._dtype is not None
        matrices: dict[tuple[int, MatrixRole], Any] = {
            place: part for name, part in self._parts.items() if (place := matrix_place(name)) is not None
        }
        matrices.setdefault((0, _R.HEAD), matrices[0, _R.EMBEDDING])
        for (layer, role), part in matrices.items():
            if role in _BIASES and (bias := self._vectors.get((layer, _BIASES[role]))) is not None:
                part.whole.set_bias(part.whole.parts.index(part), bias.to(self._dtype))
        layers = [self._layer(number) for number in range(self._shape.layers)]
        return DeviceModel(
            self._shape,
            layers,
            self._whole[0, _R.EMBEDDING],
            self._whole[0, _R.HEAD],
            self._vectors[0, VectorRole.FINAL_NORM],
            self._dtype,
            matrices,
        )

    def _layer(self, number: int) -> Layer:
        whole, vectors = self._whole, self._vectors
        router = vectors.get((number, VectorRole.ROUTER))
        return Layer(
            whole[number, _R.QUERY],
            whole[number, _R.OUTPUT],
            (whole[number, _R.GATE], whole[number, _R.DOWN])
            if router is None
            else Experts(router, whole[number, _R.EXPERT_GATE_UP], whole[number, _R.EXPERT_DOWN]),
            vectors[number, VectorRole.ATTENTION_NORM],
            vectors[number, VectorRole.FEED_FORWARD_NORM],
            vectors.get((number, VectorRole.QUERY_NORM)),
            vectors.get((number, VectorRole.KEY_NORM)),
            self._shape.window[number],
        )


def _product(shape: tuple[int, int, int]) -> int:
    return shape[0] * shape[1] * shape[2]


def _settle(device: torch.device) -> None:
    """Planes are where they belong, and what is not used any more goes back to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def device_bytes(folder: PackedFolder, precision: Precision) -> int:
    """Bytes of a device's memory that a folder's packed weights take, loaded up to a width."""
    return sum(
        planes_bytes(entry.shape, max(precision, entry.floor)) for entry in folder.entries if entry.floor is not None
    )


def free_bytes(device: torch.device) -> float:
    """Bytes of a GPU's memory that can be had; without end on a CPU."""
    if device.type != "cuda":
        return math.inf
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + kept)


def check_memory(folder: PackedFolder, precision: Precision, free: float) -> None:
    """An error if a width, and what running takes besides, has no room in so many bytes; it says which would."""
    needed = {width: device_bytes(folder, width) + RESERVE for width in (precision, *folder.precisions)}
    if needed[precision] > free:
        fitting = next((width for width in folder.precisions if needed[width] <= free), None)
        raise OtaroError(
            f"{precision} takes {(needed[precision] - RESERVE) / 1e9:.1f} GB of the GPU's memory and "
            f"{RESERVE / 1e9:.0f} GB to work with, and {free / 1e9:.1f} GB are free: "
            f"{'not even the narrowest precision fits' if fitting is None else f'{fitting} fits'}"
        )
