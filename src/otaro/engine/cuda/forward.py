"""Tokens through the layers of a model on a device.

One function for everything: a few rows of several texts, or many tokens of one prompt. What differs is attention
(`Prompt`: torch's own, over one text) and, beyond 16 rows, the products, for which weights are decoded first. Sums of
the residual stream are float32; all else is the model's own type, logits float16.

Nothing here waits for the device or looks at its numbers for up to 16 rows, so that all of it can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from otaro.engine.cuda import fused, plain
from otaro.engine.cuda.matrices import Product
from otaro.engine.cuda.model import DeviceModel, Experts, Layer
from otaro.engine.cuda.rows import DeviceSession, Rows
from otaro.engine.shape import Shape
from otaro.ops import cuda


@dataclass(frozen=True)
class Prompt:
    """Neighbouring tokens of one text, from a position on."""

    session: DeviceSession
    position: int


class Stream:
    """The residual stream, and the last product, which is yet to be added to it."""

    def __init__(self, x: Tensor, epsilon: float) -> None:
        self.x, self.epsilon = x, epsilon
        self.delta: Tensor | None = None

    def norm(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm, once the last product is added."""
        normed = fused.norm(self.x, self.delta, weight, self.epsilon, dtype)
        self.delta = None
        return normed

    def multiply(self, product: Product, weight: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        """A product with the norm, both in one launch where that can be."""
        result = self._joined(product, weight, dtype, width, False)
        return product.multiply(self.norm(weight, dtype), width) if result is None else result

    def gated(self, product: Product, up: int, inner: int, weight: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        """silu(gate) · up of a product with the norm, in as few launches as can be."""
        result = self._joined(product, weight, dtype, width, True)
        if result is not None:
            return result
        normed = self.norm(weight, dtype)
        result = product.gated(normed, width)
        return fused.swiglu(product.multiply(normed, width), inner, up) if result is None else result

    def _joined(self, product: Product, weight: Tensor, dtype: torch.dtype, width: int, gated: bool) -> Tensor | None:
        if self.x.shape[0] > 1:
            return None
        kept = self.x if self.delta is None else torch.empty_like(self.x)
        stream = cuda.Stream(self.x, self.delta, weight, kept, self.epsilon)
        result = product.normed(stream, dtype, width, gated)
        if result is not None:
            self.x, self.delta = kept, None
        return result


def states(model: DeviceModel, rows: Rows, widths: bytes, prompt: Prompt | None = None) -> Stream:
    """What the head's norm is of."""
    shape, dtype = model.shape, model.dtype
    stream = Stream(model.embedding.rows_of(rows.tokens, widths[0], torch.float32), shape.norm_epsilon)
    for number, layer in enumerate(model.layers):
        width = widths[1 + number]
        qkv = stream.multiply(layer.qkv, layer.attention_norm, dtype, width)
        if prompt is None:
            mixed = fused.mix(model, layer, number, qkv, rows)
        else:
            query = fused.rotate(model, layer, number, qkv, rows)
            mixed = plain.attend_prompt(model, layer, number, query, prompt.session, prompt.position)
        stream.delta = layer.output.multiply(mixed, width)
        stream.delta = _feed_forward(layer, stream, dtype, width, shape, None if prompt is not None else rows)
    return stream


def head_dtype(model: DeviceModel) -> torch.dtype:
    """bfloat16 has too few bits for logits: neighbours among the likeliest tokens would be one."""
    return torch.float16 if model.dtype == torch.bfloat16 and model.device.type == "cuda" else model.dtype


def _feed_forward(
    layer: Layer, stream: Stream, dtype: torch.dtype, width: int, shape: Shape, rows: Rows | None
) -> Tensor:
    """Of a batch its `rows`, of which some may not be there; a prompt has none."""
    norm = layer.feed_forward_norm
    if isinstance(layer.feed_forward, Experts):
        present = None if rows is None else rows.positions >= 0
        return _experts(layer.feed_forward, stream.norm(norm, dtype), width, shape, present)
    gate_up, down = layer.feed_forward
    inner = stream.gated(gate_up, gate_up.starts[1], shape.intermediate, norm, dtype, width)
    return down.multiply(inner, width)


def _experts(experts: Experts, x: Tensor, width: int, shape: Shape, present: Tensor | None) -> Tensor:
    """Each row through the experts that the router chooses for it, whose weights alone are read where that is less."""
    odds = torch.softmax(x.float() @ experts.router.T, -1)
    share, chosen = odds.topk(shape.experts_per_token, -1)
    if shape.experts_normalized:
        share = share / share.sum(-1, keepdim=True)
    many = present is None
    if present is not None:
        chosen = torch.where(present[:, None], chosen, 0)  # rows that are not there choose nothing
    if not many and chosen.numel() <= shape.experts:
        weight = _expert_rows(experts.gate_up, chosen, 2 * shape.expert_intermediate, width, x.dtype)
        inner = _gated((weight @ x[:, None, :, None])[..., 0])
        weight = _expert_rows(experts.down, chosen, shape.hidden, width, x.dtype)
        return ((weight @ inner[..., None])[..., 0].float() * share[..., None]).sum(1).to(x.dtype)
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number in range(shape.experts):
        # The share of a row that did not choose this expert is 0: nothing depends on numbers of the device.
        own = torch.where(chosen == number, share, 0.0).sum(-1)
        picked = own.nonzero()[:, 0] if many else None
        if picked is not None and len(picked) == 0:
            continue
        one = torch.full((1,), number, device=x.device)
        rows = x if picked is None else x[picked]
        weight = _expert_rows(experts.gate_up, one, 2 * shape.expert_intermediate, width, x.dtype)[0]
        inner = _gated(functional.linear(rows, weight))
        weight = _expert_rows(experts.down, one, shape.hidden, width, x.dtype)[0]
        outer = functional.linear(inner, weight).float()
        if picked is None:
            result += torch.where(own[:, None] != 0, outer * own[:, None], 0.0)  # infinity times 0 is NaN
        else:
            result[picked] += outer * own[picked, None]
    return result.to(x.dtype)


def _expert_rows(matrix: Product, experts: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[*experts, rows, columns]: whole experts' matrices."""
    ids = experts[..., None] * rows + torch.arange(rows, device=experts.device)
    return matrix.rows_of(ids, width, dtype)


def _gated(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)
