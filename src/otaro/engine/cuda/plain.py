"""The kernels' counterparts in plain torch, row by row, and what prompts do on every device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from otaro import packing, sefp
from otaro.engine.cuda.matrices import TURN
from otaro.engine.cuda.model import DeviceModel, Layer
from otaro.engine.cuda.rows import CacheLayout, DeviceSession, Rows
from otaro.packing import Planes
from otaro.precision import NARROWEST
from otaro.sefp import Format

CODES = Format("nested", 64)


def norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    if delta is not None:
        x += delta
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight).to(dtype)


def swiglu(x: Tensor, columns: int, up: int) -> Tensor:
    if up == TURN:
        x, up = x.unflatten(1, (-1, 2, TURN)).transpose(1, 2).flatten(1), x.shape[1] // 2
    return (functional.silu(x[:, :columns].float()) * x[:, up : up + columns].float()).to(x.dtype)


def rotate(model: DeviceModel, layer: Layer, number: int, qkv: Tensor, rows: Rows) -> Tensor:
    shape = model.shape
    count, dimension = qkv.shape[0], shape.head_dimension

    def heads(start: int, many: int) -> Tensor:
        return qkv[:, start : start + many * dimension].float().unflatten(1, (many, dimension))

    starts = layer.qkv.starts
    query, key, value = heads(0, shape.heads), heads(starts[1], shape.kv_heads), heads(starts[2], shape.kv_heads)
    if layer.query_norm is not None and layer.key_norm is not None:
        query = norm(query, None, layer.query_norm, shape.norm_epsilon, torch.float32)
        key = norm(key, None, layer.key_norm, shape.norm_epsilon, torch.float32)
    angle = (rows.positions[:, None].float() * model.frequency)[:, None]
    angle = torch.cat((angle, angle), -1)
    cosine, sine = angle.cos() * shape.rope_factor, angle.sin() * shape.rope_factor

    def turned(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cosine + torch.cat((-high, low), -1) * sine

    stored = torch.stack((turned(key), value), 1)  # row, key or value, head, dimension
    bits = stored.to(qkv.dtype) if rows.layout.precision is None else encode(stored, rows.layout)
    for row, (session, position) in enumerate(zip(rows.sessions, rows.positions.tolist(), strict=True)):
        if session is not None and position >= 0:
            session.cache[number, :, :, position] = bits[row]
    return turned(query).to(qkv.dtype).reshape(count, -1)


def attend(model: DeviceModel, layer: Layer, number: int, query: Tensor, rows: Rows) -> Tensor:
    shape = model.shape
    out = torch.zeros_like(query)
    for row, (session, position) in enumerate(zip(rows.sessions, rows.positions.tolist(), strict=True)):
        if session is None or position < 0:
            continue
        begin = max(0, position + 1 - layer.window) if layer.window else 0
        keys, values = held(session, number, begin, position + 1, query.dtype).float()
        queries = query[row].float().unflatten(0, (shape.kv_heads, -1, shape.head_dimension))
        odds = torch.softmax(queries @ keys.transpose(1, 2) * shape.head_dimension**-0.5, -1)
        out[row] = (odds @ values).flatten().to(query.dtype)
    return out


def attend_prompt(
    model: DeviceModel, layer: Layer, number: int, query: Tensor, session: DeviceSession, position: int
) -> Tensor:
    """Queries of many neighbouring tokens of one text, by torch's own attention, on every device."""
    shape, count = model.shape, query.shape[0]
    end = position + count
    begin = max(0, position + 1 - layer.window) if layer.window else 0
    keys, values = held(session, number, begin, end, query.dtype).repeat_interleave(shape.heads // shape.kv_heads, 1)
    queries = query.view(count, shape.heads, shape.head_dimension).transpose(0, 1)
    causal = position == 0 and (layer.window == 0 or layer.window >= count)
    mask = None
    if not causal:
        places = torch.arange(begin, end, device=query.device)
        own = torch.arange(position, end, device=query.device)[:, None]
        mask = places <= own
        if layer.window:
            mask &= places > own - layer.window
    mixed = functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=mask, is_causal=causal
    )
    return mixed[0].transpose(0, 1).reshape(count, -1)


def held(session: DeviceSession, number: int, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Keys and values of a layer, [2, heads, positions, dimension]."""
    rows = session.cache[number, :, :, begin:end]
    return rows if session.layout.precision is None else decode(rows, session.layout, dtype)


def encode(x: Tensor, layout: CacheLayout) -> Tensor:
    """Rows of a cache of codes."""
    assert layout.precision is not None
    codes = sefp.encode_unchecked(x, layout.precision, CODES)
    planes = packing.pack(codes)
    half, eighth = layout.padded // 2, layout.padded // 8
    return torch.cat((planes.base[..., :half], *(plane[..., :eighth] for plane in planes.bits), planes.scale), -1)


def decode(rows: Tensor, layout: CacheLayout, dtype: torch.dtype) -> Tensor:
    """What rows of codes stand for."""
    assert layout.precision is not None
    half, eighth = layout.padded // 2, layout.padded // 8
    extra = layout.precision.mantissa - NARROWEST.mantissa
    sizes = (half, *[eighth] * extra, layout.row - half - extra * eighth)
    base, *bits, scale = rows.split(sizes, -1)
    codes = packing.unpack(Planes(base, tuple(bits), scale), layout.dimension, layout.precision, CODES)
    return sefp.decode(codes, dtype)
