"""The kernels' counterparts in plain torch, row by row, and what prompts do on every device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from otaro import sefp
from otaro.engine.cuda.matrices import TURN
from otaro.engine.cuda.model import DeviceModel, Layer
from otaro.engine.cuda.rows import CacheLayout, DeviceSession, Rows
from otaro.precision import WIDEST
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
    encoded = encode(stored.to(qkv.dtype) if rows.layout.precision is None else stored, rows.layout)
    for row, (session, position) in enumerate(zip(rows.sessions, rows.positions.tolist(), strict=True)):
        if session is not None and position >= 0:
            for part, bits in zip(session.parts, encoded, strict=True):
                part[number, :, :, position] = bits[row]
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
    rows, scales = (part[number, :, :, begin:end] for part in session.parts)
    return decode(rows, scales, session.layout, dtype)


def encode(x: Tensor, layout: CacheLayout) -> tuple[Tensor, Tensor]:
    """Rows of a cache and their scales."""
    if layout.precision is None:
        return x, x[..., :0]
    codes = sefp.encode_unchecked(x, layout.precision, CODES)
    zero = sefp.NESTED_OFFSET >> (WIDEST.mantissa - layout.mantissa)
    code = functional.pad(codes.code, (0, layout.padded - layout.dimension), value=zero)
    planes, low = [], layout.mantissa + 1
    for field in layout.fields:
        low -= field
        order, _, places = _order(layout.padded, field, x.device)
        fields = (code[..., order] >> low & (1 << field) - 1).unflatten(-1, (-1, 8 // field))
        planes.append((fields << places).sum(-1).to(torch.uint8))
    return torch.cat(planes, -1), codes.scale


def decode(rows: Tensor, scales: Tensor, layout: CacheLayout, dtype: torch.dtype) -> Tensor:
    """What rows of a cache stand for."""
    if layout.precision is None:
        return rows
    code: Tensor | None = None
    planes = rows.split([layout.padded // 8 * field for field in layout.fields], -1)
    for field, plane in zip(layout.fields, planes, strict=True):
        _, back, places = _order(layout.padded, field, rows.device)
        fields = (plane[..., None] >> places & (1 << field) - 1).flatten(-2)
        own = fields[..., back[: layout.dimension]].to(torch.int16)
        code = own if code is None else code << field | own
    assert code is not None
    return sefp.decode(sefp.Codes(code, scales, layout.precision, CODES), dtype)


@functools.cache
def _order(padded: int, field: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The dimension of each field of a plane, the field of each dimension, and where the fields of a byte begin."""
    dimension = torch.arange(padded, device=device).reshape(-1, 4, 2, 2, 2)  # part 1 is the word's, the last its half's
    order = dimension.permute((2, 1, 0, 4, 3) if field == 8 else (1, 0, 4, 2, 3)).flatten()
    return order, order.argsort(), torch.arange(0, 8, field, dtype=torch.uint8, device=device)
