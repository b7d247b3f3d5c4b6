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
def _cache_block(places, row, ROWS, layer, which, head, KV_HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Where a head's keys (0) or values (1) begin, in elements from the beginning of a text's cache; its capacity."""
    capacity = tl.multiple_of(tl.load(places + ROWS + row), 16)  # or the vectors of loads would be shorter
    return ((layer * 2 + which) * KV_HEADS + head) * capacity * SIZE, capacity


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
    SCALES: tl.constexpr,
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
        kept = (head - HEADS) % KV_HEADS
        first, capacity = _cache_block(places, row, ROWS, layer, which, kept, KV_HEADS, ROW + SCALES)
        address = tl.load(places + row)
        if MANTISSA == 0:
            cache = address.to(tl.pointer_type(query.dtype.element_ty)) + first
            tl.store(cache + position * ROW + d, own.to(query.dtype.element_ty), mask=there)
        else:
            cache = address.to(tl.pointer_type(tl.uint8)) + first
            scales = cache + capacity * ROW + position * SCALES
            cache += position * ROW
            _store_codes(cache, scales, own, d, DIM, BLOCK, MANTISSA, PADDED, CANDIDATES, ERROR_MANTISSA)


@triton.jit
def _store_codes(
    cache,
    scales,
    value,
    d,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    PADDED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    ERROR_MANTISSA: tl.constexpr,
):
    """A row as SEFP codes, in the order of `rows.CacheLayout`."""
    GROUP: tl.constexpr = 64 if BLOCK > 64 else BLOCK
    GROUPS: tl.constexpr = BLOCK // GROUP
    grouped = tl.reshape(value, (GROUPS, GROUP))
    own = tl.reshape(d < DIM, (GROUPS, GROUP))
    missing = 0 if DIM == BLOCK else tl.sum((~own).to(tl.int32), axis=1)
    scale = _find_scale(grouped, missing, 2, CANDIDATES, ERROR_MANTISSA)
    code = _nested_code(tl.where((scale >= 128)[:, None], -grouped, grouped), scale)
    code = tl.where(own, code, 272) >> (8 - MANTISSA)
    number = tl.arange(0, GROUPS)
    tl.store(scales + number, scale.to(tl.uint8), mask=number * GROUP < DIM)
    LINES: tl.constexpr = BLOCK // 32
    WORDS: tl.constexpr = PADDED // 8
    parted = tl.permute(tl.reshape(code, (LINES, 4, 4, 2)), (1, 0, 3, 2))
    eights = tl.reshape(parted, (BLOCK // 8, 2, 4))
    word = tl.arange(0, BLOCK // 8)
    there = word % LINES < PADDED // 32
    word = word // LINES * (PADDED // 32) + word % LINES
    FIELD: tl.constexpr = 4 if MANTISSA < 7 else 8
    REST: tl.constexpr = MANTISSA + 1 - FIELD
    words = cache.to(tl.pointer_type(tl.int32)) + word
    tl.store(words, _packed(eights, REST, FIELD, 0), mask=there)
    if FIELD == 8:
        tl.store(words + WORDS, _packed(eights, REST, FIELD, 2), mask=there)
    if REST >= 2:
        twos = (cache + FIELD * WORDS).to(tl.pointer_type(tl.uint16)) + word
        tl.store(twos, _packed(eights, REST - 2, 2, 0).to(tl.uint16), mask=there)
    if REST % 2 == 1:
        ones = cache + (FIELD + REST - 1) * WORDS + word
        tl.store(ones, _packed(eights, 0, 1, 0).to(tl.uint8), mask=there)


@triton.jit
def _packed(eights, low: tl.constexpr, FIELD: tl.constexpr, FIRST: tl.constexpr):
    """A plane's words of the codes [words, half, turn]."""
    HALF: tl.constexpr = FIELD * 4 if FIELD < 4 else 16
    half, turn = tl.arange(0, 2)[None, :, None], tl.arange(0, 4)[None, None, :]
    fields = (eights >> low & ((1 << FIELD) - 1)) << (FIELD * turn % 16 + HALF * half)
    if FIELD == 8:
        fields = tl.where(turn // 2 == FIRST // 2, fields, 0)
    return tl.sum(tl.sum(fields, axis=2), axis=1)


@triton.jit
def _field(word, start: tl.constexpr, end: tl.constexpr, BITS: tl.constexpr):
    """A field of each half of a word, taken from one place to another."""
    if end > start:
        word = word << (end - start)
    elif start > end:
        word = word >> (start - end)
    return word & ((1 << BITS) - 1 << end) * 0x10001


@triton.jit
def _halves(word, twos, ones, turn: tl.constexpr, step, MANTISSA: tl.constexpr):
    """The numbers of both halves whose turn it is.

    Half floats without exponents are multiples of 2^-24, so the bits of a code are a number as they are, exact until it
    is multiplied by the scale.
    """
    FIELD: tl.constexpr = 4 if MANTISSA < 7 else 8
    REST: tl.constexpr = MANTISSA + 1 - FIELD
    code = _field(word, FIELD * turn % 16, 11 - FIELD, FIELD)
    if REST >= 2:
        code |= _field(twos, 2 * turn, 9 - FIELD, 2)
    if REST % 2 == 1:
        code |= _field(ones, turn, 10 - MANTISSA, 1)
    middle: tl.constexpr = 1.0 / (1 << MANTISSA) - 2.125
    low = (code & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (code >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return (low * 32768.0 + middle) * step, (high * 32768.0 + middle) * step


@triton.jit
def _four(first, second, third, fourth):
    """Four numbers side by side."""
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _load_rows(
    cache,
    capacity,
    key,
    seen,
    MANTISSA: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Keys or values; codes are decoded to float16.

    Each bit is loaded once, by vectors: four neighbouring threads take a row, which hold just the dimensions of it then
    that tensor cores want of them for the scores.
    """
    if MANTISSA == 0:
        d = tl.arange(0, BLOCK)
        valid = seen[:, None] & (d < DIM)[None, :]
        rows = tl.load(cache + key[:, None] * ROW + d[None, :], mask=valid, other=0.0)
    else:
        LINES: tl.constexpr = BLOCK // 32
        WORDS: tl.constexpr = PADDED // 8
        part, line = tl.arange(0, 4)[:, None, None], tl.arange(0, LINES)[None, None, :]
        TILE: tl.constexpr = key.shape[0]
        scales = cache + capacity * ROW + key * SCALES
        key, valid = key[None, :, None], seen[None, :, None]
        if PADDED < BLOCK:
            valid &= line < PADDED // 32
        word = part * (PADDED // 32) + line
        words = cache.to(tl.pointer_type(tl.uint32)) + key * (ROW // 4) + word
        first = tl.load(words, mask=valid, other=0)
        second, twos, ones = first, first, first
        if MANTISSA >= 7:
            second = tl.load(words + WORDS, mask=valid, other=0)
        FIELD: tl.constexpr = 4 if MANTISSA < 7 else 8
        REST: tl.constexpr = MANTISSA + 1 - FIELD
        rest = cache + FIELD * WORDS
        if REST >= 2:
            twos = tl.load(rest.to(tl.pointer_type(tl.uint16)) + key * (ROW // 2) + word, mask=valid, other=0)
            twos = twos.to(tl.uint32)
            twos |= twos << 8
        if REST % 2 == 1:
            ones = tl.load(rest + (REST - 1) * WORDS + key * ROW + word, mask=valid, other=0).to(tl.uint32)
            ones |= ones << 12
        scale = tl.load(scales, mask=seen, other=0)[None, :, None]
        for group in tl.static_range(1, SCALES):
            scale = tl.where(line // 2 < group, scale, tl.load(scales + group, mask=seen, other=0)[None, :, None])
        step = (scale.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
        low0, high0 = _halves(first, twos, ones, 0, step, MANTISSA)
        low1, high1 = _halves(first, twos, ones, 1, step, MANTISSA)
        low2, high2 = _halves(second, twos, ones, 2, step, MANTISSA)
        low3, high3 = _halves(second, twos, ones, 3, step, MANTISSA)
        low, high = _four(low0, low1, low2, low3), _four(high0, high1, high2, high3)
        rows = tl.reshape(tl.permute(tl.join(low, high), (1, 2, 0, 3, 4, 5)), (TILE, BLOCK))
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
    SCALES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """All queries that share a key head, against one stretch of keys."""
    row, head, stretch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    address = tl.load(places + row)
    first_key, capacity = _cache_block(places, row, ROWS, layer, 0, head, KV_HEADS, ROW + SCALES)
    first_value, _ = _cache_block(places, row, ROWS, layer, 1, head, KV_HEADS, ROW + SCALES)
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
        line = (row.to(tl.int64) * KV_HEADS + head) * GROUP + g
        own = (g < GROUP)[:, None] & (d < DIM)[None, :]
        queries = tl.load(query + line[:, None] * DIM + d[None, :], mask=own, other=0.0)
        factor = tl.full((1, 1), 1.0, tl.float32) * scale
        if (MANTISSA > 0) & (kind == tl.bfloat16):  # decoded keys are float16, which has no room for such queries
            queries = queries.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(queries), axis=1), 1e-30)[:, None]
            queries = (queries / largest).to(tl.float16)
            factor = scale * largest
        most = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_BLOCK,), tl.float32)
        mixed = tl.zeros((GROUP_BLOCK, BLOCK), tl.float32)
        for tile in range(0, KEYS, TILE):
            key = start + tile + n
            seen = (key <= position) & (key >= begin)
            keys = _load_rows(cache + first_key, capacity, key, seen, MANTISSA, DIM, PADDED, BLOCK, ROW, SCALES)
            values = _load_rows(cache + first_value, capacity, key, seen, MANTISSA, DIM, PADDED, BLOCK, ROW, SCALES)
            if MANTISSA > 0:
                # Triton orders a product for the narrowest numbers it sees its factors made of. That fits keys, and has
                # values go through shared memory one by one; through a sum, if only of one number, it does not see.
                values = tl.sum(tl.reshape(values, (TILE, BLOCK, 1)), axis=2)
            scores = tl.dot(queries, tl.trans(keys)) * factor
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, axis=1))
            level = tl.where(higher == float("-inf"), 0.0, higher)  # a tile of which nothing is seen
            fade = tl.exp(most - level)
            odds = tl.exp(scores - level[:, None])
            total = total * fade + tl.sum(odds, axis=1)
            mixed = mixed * fade[:, None] + tl.dot(odds.to(values.dtype), values)
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
        first_key, _ = _cache_block(places, 0, 1, layer, 0, head, KV_HEADS, DIM)
        first_value, _ = _cache_block(places, 0, 1, layer, 1, head, KV_HEADS, DIM)
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
