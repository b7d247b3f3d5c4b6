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


@dataclass(frozen=True)
class Prompt:
    """Neighbouring tokens of one text, from a position on."""

    session: DeviceSession
    position: int


def states(model: DeviceModel, rows: Rows, widths: bytes, prompt: Prompt | None = None) -> Tensor:
    """What the head is multiplied with, [rows, hidden]."""
    shape, dtype = model.shape, model.dtype
    x = model.embedding.rows_of(rows.tokens, widths[0], torch.float32)
    delta: Tensor | None = None
    for number, layer in enumerate(model.layers):
        width = widths[1 + number]
        normed = fused.norm(x, delta, layer.attention_norm, shape.norm_epsilon, dtype)
        qkv = layer.qkv.multiply(normed, width)
        if prompt is None:
            mixed = fused.mix(model, layer, number, qkv, rows)
        else:
            query = fused.rotate(model, layer, number, qkv, rows)
            mixed = plain.attend_prompt(model, layer, number, query, prompt.session, prompt.position)
        delta = layer.output.multiply(mixed, width)
        normed = fused.norm(x, delta, layer.feed_forward_norm, shape.norm_epsilon, dtype)
        delta = _feed_forward(layer, normed, width, shape, None if prompt is not None else rows)
    return fused.norm(x, delta, model.final_norm, shape.norm_epsilon, head_dtype(model))


def head_dtype(model: DeviceModel) -> torch.dtype:
    """bfloat16 has too few bits for logits: neighbours among the likeliest tokens would be one."""
    return torch.float16 if model.dtype == torch.bfloat16 and model.device.type == "cuda" else model.dtype


def _feed_forward(layer: Layer, x: Tensor, width: int, shape: Shape, rows: Rows | None) -> Tensor:
    """Of a batch its `rows`, of which some may not be there; a prompt has none."""
    if isinstance(layer.feed_forward, Experts):
        present = None if rows is None else rows.positions >= 0
        return _experts(layer.feed_forward, x, width, shape, present)
    gate_up, down = layer.feed_forward
    inner = None if rows is None else gate_up.gated(x, width)
    if inner is None:
        inner = fused.swiglu(gate_up.multiply(x, width), shape.intermediate, gate_up.starts[1])
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
