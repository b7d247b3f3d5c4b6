"""What lies between two products of a layer, each one launch on a GPU, in Triton.

    norm      the residual stream takes up the last product; its RMS norm
    rotate    queries, keys and values of a token: query and key norms, rotary positions, keys and values into the cache
    attend    queries against a stretch of 128 keys; `combine` puts the stretches together where there are several
    mix       `rotate` and `attend` of one token
    swiglu    gate and up, where they are not one product with it
    largest   the likeliest token of each part of the vocabulary; `likeliest`: of all parts

A row of a batch knows its text by an address, not by a place in a common cache: texts grow and move, captured graphs
stay. Nothing a row goes through depends on the rows beside it, nor on how many stretches the longest text has, so a
token is the same to the bit alone, in company and as a guess that is checked.

Where a launch is allowed to overlap its predecessor (`OVERLAP`) it reads nothing before `gdc_wait` that a launch of the
same step may have written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from otaro.ops.gpu import _find_scale, _nested_code


@triton.jit
def _await(OVERLAP: tl.constexpr):
    """Let the next launch prepare itself, and wait for what the last one wrote."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def norm_kernel(
    x, delta, weight, out, epsilon, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < HIDDEN
    factor = tl.load(weight + column, mask=there, other=0.0)
    _await(OVERLAP)
    place = row * HIDDEN + column
    value = tl.load(x + place, mask=there, other=0.0)
    if ADD:
        value += tl.load(delta + place, mask=there, other=0.0).to(tl.float32)
        tl.store(x + place, value, mask=there)
    mean = tl.sum(value * value, axis=0) / HIDDEN
    scaled = value * tl.rsqrt(mean + epsilon) * factor
    tl.store(out + place, scaled.to(out.dtype.element_ty), mask=there)


@triton.jit
def swiglu_kernel(
    x,
    out,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    UP: tl.constexpr,
    TURN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < COLUMNS
    place = column
    if TURN > 0:  # so many of each, in turns
        place = column // TURN * (2 * TURN) + column % TURN
    _await(OVERLAP)
    gate = tl.load(x + row * STRIDE + place, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x + row * STRIDE + UP + place, mask=there, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * COLUMNS + column, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _cache_row(places, row, ROWS, layer, which, head, position, KV_HEADS: tl.constexpr, ROW: tl.constexpr):
    """Where the key (0) or value (1) of a head at a position lies, in elements from the beginning of a text's cache."""
    capacity = tl.load(places + ROWS + row)
    return (((layer * 2 + which) * KV_HEADS + head) * capacity + position) * ROW


@triton.jit(do_not_specialize=("ROWS", "layer"))
def rotate_kernel(
    qkv,
    positions,
    places,
    frequency,
    query_norm,
    key_norm,
    query,
    ROWS,
    layer,
    epsilon,
    rope_factor,
    STRIDE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    MANTISSA: tl.constexpr,
    PADDED: tl.constexpr,
    ROW: tl.constexpr,
    CANDIDATES: tl.constexpr,
    ERROR_MANTISSA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    there = d < DIM
    half: tl.constexpr = DIM // 2
    partner = tl.where(d < half, d + half, d - half)
    turn = tl.load(frequency + tl.where(d < half, d, d - half), mask=there, other=0.0)
    _await(OVERLAP)
    position = tl.load(positions + row)
    start = tl.where(head < HEADS, head * DIM, KEY + (head - HEADS) * DIM)
    start = tl.where(head < HEADS + KV_HEADS, start, VALUE + (head - HEADS - KV_HEADS) * DIM)
    source = qkv + row.to(tl.int64) * STRIDE + start
    own = tl.load(source + d, mask=there, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        other = tl.load(source + partner, mask=there, other=0.0).to(tl.float32)
        if NORMED:
            scale = tl.rsqrt(tl.sum(own * own, axis=0) / DIM + epsilon)
            if head < HEADS:
                factor = tl.load(query_norm + d, mask=there, other=0.0)
                other_factor = tl.load(query_norm + partner, mask=there, other=0.0)
            else:
                factor = tl.load(key_norm + d, mask=there, other=0.0)
                other_factor = tl.load(key_norm + partner, mask=there, other=0.0)
            own, other = own * scale * factor, other * scale * other_factor
        own = _turned(own, other, d, half, position.to(tl.float32) * turn, rope_factor)
    if head < HEADS:
        tl.store(query + (row.to(tl.int64) * HEADS + head) * DIM + d, own.to(query.dtype.element_ty), mask=there)
    elif position >= 0:
        which = (head - HEADS) // KV_HEADS
        place = _cache_row(places, row, ROWS, layer, which, (head - HEADS) % KV_HEADS, position, KV_HEADS, ROW)
        address = tl.load(places + row)
        if MANTISSA == 0:
            cache = address.to(tl.pointer_type(query.dtype.element_ty))
            tl.store(cache + place + d, own.to(query.dtype.element_ty), mask=there)
        else:
            cache = address.to(tl.pointer_type(tl.uint8)) + place
            _store_codes(cache, own, d, DIM, BLOCK, MANTISSA, PADDED, CANDIDATES, ERROR_MANTISSA)


@triton.jit
def _store_codes(
    cache,
    value,
    d,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    PADDED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    ERROR_MANTISSA: tl.constexpr,
):
    """A row as SEFP codes: nibbles, then a plane of each further bit, then a byte of scale for each 64 dimensions."""
    GROUP: tl.constexpr = 64 if BLOCK > 64 else BLOCK
    GROUPS: tl.constexpr = BLOCK // GROUP
    grouped = tl.reshape(value, (GROUPS, GROUP))
    own = tl.reshape(d < DIM, (GROUPS, GROUP))
    scale = _find_scale(grouped, own, 2, CANDIDATES, ERROR_MANTISSA)
    code = _nested_code(tl.where((scale >= 128)[:, None], -grouped, grouped), scale)
    code = tl.where(own, code, 272)
    flat = tl.reshape(code, (BLOCK,))
    pairs = tl.reshape(flat >> 5, (BLOCK // 2, 2))
    byte = tl.arange(0, BLOCK // 2)
    packed = tl.sum(pairs << (4 * tl.arange(0, 2))[None, :], axis=1)
    tl.store(cache + byte, packed.to(tl.uint8), mask=byte < PADDED // 2)
    eighth = tl.arange(0, BLOCK // 8)
    for extra in tl.static_range(0, MANTISSA - 3):
        bits = tl.reshape((flat >> (4 - extra)) & 1, (BLOCK // 8, 8))
        packed = tl.sum(bits << tl.arange(0, 8)[None, :], axis=1)
        tl.store(cache + PADDED // 2 + extra * (PADDED // 8) + eighth, packed.to(tl.uint8), mask=eighth < PADDED // 8)
    number = tl.arange(0, GROUPS)
    scales: tl.constexpr = PADDED // 2 + (MANTISSA - 3) * (PADDED // 8)
    tl.store(cache + scales + number, scale.to(tl.uint8), mask=number * GROUP < DIM)


@triton.jit
def _load_rows(cache, first, key, d, valid, MANTISSA: tl.constexpr, PADDED: tl.constexpr, ROW: tl.constexpr):
    """Keys or values as float32, decoded if they are codes."""
    if MANTISSA == 0:
        rows = tl.load(cache + first + key[:, None] * ROW + d[None, :], mask=valid, other=0.0).to(tl.float32)
    else:
        base = cache + first + key[:, None] * ROW
        byte = tl.load(base + (d // 2)[None, :], mask=valid, other=0).to(tl.int32)
        code = (byte >> (4 * (d & 1))[None, :]) & 15
        for extra in tl.static_range(0, MANTISSA - 3):
            plane = base + PADDED // 2 + extra * (PADDED // 8)
            bits = tl.load(plane + (d // 8)[None, :], mask=valid, other=0).to(tl.int32)
            code = code << 1 | ((bits >> (d & 7)[None, :]) & 1)
        scales: tl.constexpr = PADDED // 2 + (MANTISSA - 3) * (PADDED // 8)
        scale = tl.load(base + scales + (d // 64)[None, :], mask=valid, other=0)
        step = (scale.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
        unit: tl.constexpr = 1.0 / (1 << (MANTISSA - 1))
        bias: tl.constexpr = 0.5 - 8.5 * (1 << (MANTISSA - 3))
        rows = (code.to(tl.float32) + bias) * (step * unit)
    return rows


@triton.jit(do_not_specialize=("ROWS", "layer"))
def attend_kernel(
    query,
    positions,
    places,
    out,
    partial,
    extremes,
    ROWS,
    layer,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    STRETCHES: tl.constexpr,
    MANTISSA: tl.constexpr,
    PADDED: tl.constexpr,
    ROW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """All queries that share a key head, against one stretch of keys."""
    row, head, stretch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    address = tl.load(places + row)
    _await(OVERLAP)
    begin = tl.full((), 0, tl.int64)
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0)
    start = stretch * KEYS
    if (start <= position) & (start + KEYS > begin):
        kind = query.dtype.element_ty
        d, g, n = tl.arange(0, BLOCK), tl.arange(0, GROUP_BLOCK), tl.arange(0, TILE)
        stored: tl.constexpr = kind if MANTISSA == 0 else tl.uint8
        cache = tl.multiple_of(address.to(tl.pointer_type(stored)), 16)  # or loads would be of single numbers
        first_key = _cache_row(places, row, ROWS, layer, 0, head, 0, KV_HEADS, ROW)
        first_value = _cache_row(places, row, ROWS, layer, 1, head, 0, KV_HEADS, ROW)
        line = (row.to(tl.int64) * KV_HEADS + head) * GROUP + g
        own = (g < GROUP)[:, None] & (d < DIM)[None, :]
        queries = tl.load(query + line[:, None] * DIM + d[None, :], mask=own, other=0.0)
        most = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_BLOCK,), tl.float32)
        mixed = tl.zeros((GROUP_BLOCK, BLOCK), tl.float32)
        for tile in range(0, KEYS, TILE):
            key = start + tile + n
            seen = (key <= position) & (key >= begin)
            valid = seen[:, None] & (d < DIM)[None, :]
            keys = _load_rows(cache, first_key, key, d, valid, MANTISSA, PADDED, ROW).to(kind)
            values = _load_rows(cache, first_value, key, d, valid, MANTISSA, PADDED, ROW).to(kind)
            scores = tl.dot(queries, tl.trans(keys)) * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, axis=1))
            level = tl.where(higher == float("-inf"), 0.0, higher)  # a tile of which nothing is seen
            fade = tl.exp(most - level)
            odds = tl.exp(scores - level[:, None])
            total = total * fade + tl.sum(odds, axis=1)
            mixed = mixed * fade[:, None] + tl.dot(odds.to(kind), values)
            most = higher
        if STRETCHES == 1:
            tl.store(out + line[:, None] * DIM + d[None, :], (mixed / total[:, None]).to(kind), mask=own)
        else:
            place = line * STRETCHES + stretch
            tl.store(partial + place[:, None] * DIM + d[None, :], mixed, mask=own)
            tl.store(extremes + 2 * place, most, mask=g < GROUP)
            tl.store(extremes + 2 * place + 1, total, mask=g < GROUP)


@triton.jit
def _turned(own, other, d, half, angle, rope_factor):
    """Numbers at a rotary position, of which `other` are the partners."""
    other = tl.where(d < half, -other, other)
    return (own * tl.cos(angle) + other * tl.sin(angle)) * rope_factor


@triton.jit(do_not_specialize=("layer",))
def mix_kernel(
    qkv,
    positions,
    places,
    frequency,
    out,
    partial,
    extremes,
    layer,
    scale,
    rope_factor,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    STRETCHES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token: keys and values of those before it are loaded before its own are known."""
    head, stretch = tl.program_id(0), tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions)
    begin = tl.full((), 0, tl.int64)
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0)
    start = stretch * KEYS
    if (start <= position) & (start + KEYS > begin):
        kind = qkv.dtype.element_ty
        d, g, n = tl.arange(0, BLOCK), tl.arange(0, GROUP_BLOCK), tl.arange(0, KEYS)
        there = d < DIM
        cache = tl.multiple_of(tl.load(places).to(tl.pointer_type(kind)), 16)
        first_key = _cache_row(places, 0, 1, layer, 0, head, 0, KV_HEADS, DIM)
        first_value = _cache_row(places, 0, 1, layer, 1, head, 0, KV_HEADS, DIM)
        key = start + n
        seen = (key <= position) & (key >= begin)
        before = (seen & (key < position))[:, None] & there[None, :]
        keys = tl.load(cache + first_key + key[:, None] * DIM + d[None, :], mask=before, other=0.0)
        values = tl.load(cache + first_value + key[:, None] * DIM + d[None, :], mask=before, other=0.0)
        half: tl.constexpr = DIM // 2
        partner = tl.where(d < half, d + half, d - half)
        turn = tl.load(frequency + tl.where(d < half, d, d - half), mask=there, other=0.0)
        angle = position.to(tl.float32) * turn
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        line = head * GROUP + g
        own = (g < GROUP)[:, None] & there[None, :]
        straight = tl.load(qkv + line[:, None] * DIM + d[None, :], mask=own, other=0.0).to(tl.float32)
        crossed = tl.load(qkv + line[:, None] * DIM + partner[None, :], mask=own, other=0.0).to(tl.float32)
        queries = _turned(straight, crossed, d[None, :], half, angle[None, :], rope_factor).to(kind)
        if start + KEYS > position:
            own_key = tl.load(qkv + KEY + head * DIM + d, mask=there, other=0.0).to(tl.float32)
            key_partner = tl.load(qkv + KEY + head * DIM + partner, mask=there, other=0.0).to(tl.float32)
            new_key = _turned(own_key, key_partner, d, half, angle, rope_factor).to(kind)
            new_value = tl.load(qkv + VALUE + head * DIM + d, mask=there, other=0.0)
            tl.store(cache + first_key + position * DIM + d, new_key, mask=there)
            tl.store(cache + first_value + position * DIM + d, new_value, mask=there)
            newest = (key == position)[:, None]
            keys = tl.where(newest, new_key[None, :], keys)
            values = tl.where(newest, new_value[None, :], values)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        most = tl.max(scores, axis=1)
        odds = tl.exp(scores - most[:, None])
        total = tl.sum(odds, axis=1)
        mixed = tl.dot(odds.to(kind), values)
        if STRETCHES == 1:
            tl.store(out + line[:, None] * DIM + d[None, :], (mixed / total[:, None]).to(kind), mask=own)
        else:
            place = line * STRETCHES + stretch
            tl.store(partial + place[:, None] * DIM + d[None, :], mixed, mask=own)
            tl.store(extremes + 2 * place, most, mask=g < GROUP)
            tl.store(extremes + 2 * place + 1, total, mask=g < GROUP)


@triton.jit
def combine_kernel(
    positions,
    partial,
    extremes,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    STRETCHES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Stretches come sixteen at a time and in their order, however many the launch has room for."""
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    some = tl.arange(0, 16)
    position = tl.load(positions + row)
    begin = tl.full((), 0, tl.int64)
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0)
    line = row.to(tl.int64) * HEADS + head
    _await(OVERLAP)
    if (position >= 0) & (STRETCHES <= 16):  # all loads at once
        used = (some * KEYS <= position) & ((some + 1) * KEYS > begin)
        place = line * STRETCHES + some
        own = used[:, None] & (d < DIM)[None, :]
        here = tl.load(extremes + 2 * place, mask=used, other=float("-inf"))
        sums = tl.load(extremes + 2 * place + 1, mask=used, other=0.0)
        part = tl.load(partial + place[:, None] * DIM + d[None, :], mask=own, other=0.0)
        share = tl.exp(here - tl.max(here, axis=0))
        total = tl.sum(share * sums, axis=0)
        mixed = tl.sum(share[:, None] * part, axis=0)
        tl.store(out + line * DIM + d, (mixed / total).to(out.dtype.element_ty), mask=d < DIM)
    elif position >= 0:
        most = tl.full((), float("-inf"), tl.float32)
        for start in range(0, STRETCHES, 16):
            stretch = start + some
            used = (stretch * KEYS <= position) & ((stretch + 1) * KEYS > begin)
            here = tl.load(extremes + 2 * (line * STRETCHES + stretch), mask=used, other=float("-inf"))
            most = tl.maximum(most, tl.max(here, axis=0))
        total = tl.full((), 0.0, tl.float32)
        mixed = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, STRETCHES, 16):
            stretch = start + some
            used = (stretch * KEYS <= position) & ((stretch + 1) * KEYS > begin)
            place = line * STRETCHES + stretch
            share = tl.exp(tl.load(extremes + 2 * place, mask=used, other=float("-inf")) - most)
            total += tl.sum(share * tl.load(extremes + 2 * place + 1, mask=used, other=0.0), axis=0)
            own = used[:, None] & (d < DIM)[None, :]
            part = tl.load(partial + place[:, None] * DIM + d[None, :], mask=own, other=0.0)
            mixed += tl.sum(share[:, None] * part, axis=0)
        tl.store(out + line * DIM + d, (mixed / total).to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def largest_kernel(
    logits, largest, places, VOCABULARY: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """The largest logit of a part of the vocabulary, the first of equal ones; infinite where one is no number."""
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    _await(OVERLAP)
    here = logits + row.to(tl.int64) * VOCABULARY + column
    value = tl.load(here, mask=column < VOCABULARY, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))
    most, place = tl.max(value, axis=0, return_indices=True)
    tl.store(largest + row * PARTS + part, most)
    tl.store(places + row * PARTS + part, part * BLOCK + place)


@triton.jit
def likeliest_kernel(
    largest, places, token, NONE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    _await(OVERLAP)
    value = tl.load(largest + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    most, which = tl.max(value, axis=0, return_indices=True)
    found = tl.load(places + row * PARTS + which).to(tl.int64)
    tl.store(token + row, tl.where((most - most) == 0.0, found, NONE))
