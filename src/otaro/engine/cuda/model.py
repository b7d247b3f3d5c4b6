"""A decoder on a device: its layers' matrices and vectors, put together for few launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otaro.engine.cuda.matrices import Product
from otaro.engine.shape import AnyMatrix, MatrixRole, Shape
from otaro.precision import WIDEST, Precision


@dataclass
class Experts:
    """A router, and the matrices of all experts, [experts, rows, columns] each."""

    router: Tensor
    gate_up: Product
    down: Product


@dataclass
class Layer:
    """Norms are float32; `feed_forward` is gate with up, and down, or experts."""

    qkv: Product
    output: Product
    feed_forward: tuple[Product, Product] | Experts
    attention_norm: Tensor
    feed_forward_norm: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    window: int = 0


class DeviceModel:
    """What a device runs. `matrices` are the packed ones by layer and role, as the files have them."""

    def __init__(
        self,
        shape: Shape,
        layers: list[Layer],
        embedding: Product,
        head: Product,
        final_norm: Tensor,
        dtype: torch.dtype,
        matrices: Mapping[tuple[int, MatrixRole], AnyMatrix],
    ) -> None:
        self.shape, self.layers, self.embedding, self.head = shape, layers, embedding, head
        self.final_norm, self.dtype, self.device = final_norm, dtype, final_norm.device
        self.frequency = torch.tensor(shape.rope_frequency, dtype=torch.float32, device=self.device)
        self._matrices = matrices
        self._drops = [0] * (WIDEST.mantissa + 1)

    def dropped(self, precision: Precision) -> None:
        """Take note that planes above a width have gone."""
        for bit in range(precision.mantissa + 1, WIDEST.mantissa + 1):
            self._drops[bit] += 1

    def stamp(self, widths: bytes) -> int:
        """Another number once planes that these widths read have gone: what was captured before must not run again."""
        return sum(self._drops[: max(widths) + 1])

    @property
    def matrices(self) -> Mapping[tuple[int, MatrixRole], AnyMatrix]:
        return self._matrices
