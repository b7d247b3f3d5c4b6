// The values of SEFP weights of the nested scheme: whole matrices, or rows by their numbers.

// Two neighbouring codes of a row, in the halves of a word.
template <typename Words> DEVICE u32 two_codes(u32 base, const Words& bits, int extra, int step, int pair, int lower) {
    u32 codes = rotate_right(base, 6 - 4 * pair + 8 * lower) & 0x000F000Fu;
    UNROLL
    for (int b = 0; b < MOST_EXTRA; b++)
        if (b < extra) codes = codes << 1 | (rotate_right(bits[b], single_place(step, pair) + 8 * lower) & 0x00010001u);
    return codes;
}

enum Kind { HALF, BFLOAT, FLOAT };

struct Decode {
    Planes planes;
    const long long* ids; // the rows asked for, or none: all of them
    void* values;         // [count, columns]
    long long count;
    int extra, kind;
};

DEVICE void decode_four(float (&value)[4], const Planes& planes, int extra, long long row, int column) {
    int g = (column >> 6) & 3, s = (column >> 4) & 3, lane = (int)(row & 7) * 4 + ((column >> 2) & 3);
    int lower = (int)(row >> 3) & 1;
    long long unit = (row >> 4) * planes.units + (column >> 8);
    u32 base = load_global((const u32*)(planes.base + unit * UNIT_BASE) + g * 128 + lane * 4 + s), bits[MOST_EXTRA];
    UNROLL
    for (int b = 0; b < MOST_EXTRA; b++)
        if (b < extra) bits[b] = load_global((const u32*)(planes.bits[b] + unit * UNIT_BITS) + lane * 4 + g);
    u32 byte = load_global(planes.scale + unit * UNIT_SCALE + (row & 7) * 8 + g * 2 + lower);
    float step = float_of_half(byte << 8) * float_of_bits((u32)(125 - extra) << 23), bias = format_bias(extra + 3);
    UNROLL
    for (int pair = 0; pair < 2; pair++) {
        u32 codes = two_codes(base, bits, extra, s, pair, lower);
        UNROLL
        for (int j = 0; j < 2; j++) {
            // A code below 2^23 in the mantissa of 2^23: converting integers is slow.
            float code = float_of_bits(0x4B000000u | (j ? codes >> 16 : codes & 0xFFFF)) - 8388608.0f;
            value[2 * pair + j] = multiply(code + bias, step);
        }
    }
}

DEVICE void store_four(const Decode& call, long long place, int column, const float (&value)[4]) {
    const int columns = call.planes.columns;
    const long long at = place * columns + column;
    u32 words[2];
    UNROLL
    for (int j = 0; j < 2; j++)
        words[j] = call.kind == HALF ? halves_of_floats(value[2 * j], value[2 * j + 1])
                                     : bfloats_of_floats(value[2 * j], value[2 * j + 1]);
    if (call.kind != FLOAT && (columns & 3) == 0) {
        uint2 stored = {words[0], words[1]};
        store_global((uint2*)((u16*)call.values + at), stored);
        return;
    }
    UNROLL
    for (int j = 0; j < 4; j++) {
        if (column + j >= columns) return;
        if (call.kind == FLOAT)
            store_global((float*)call.values + at + j, value[j]);
        else
            store_global((u16*)call.values + at + j, (u16)(words[j >> 1] >> (16 * (j & 1))));
    }
}

// A block takes a row, a thread four neighbouring columns. Rows outside of the matrix become NaN.
KERNEL decode_kernel(PARAMETER Decode call) {
    for (long long place = block_index(); place < call.count; place += grid_blocks()) {
        long long row = call.ids == nullptr ? place : load_global(call.ids + place);
        for (int column = 4 * thread_index(); column < call.planes.columns; column += 4 * block_threads()) {
            const float nan = float_of_bits(0x7FC00000u);
            float value[4] = {nan, nan, nan, nan};
            if (row >= 0 && row < call.planes.rows) decode_four(value, call.planes, call.extra, row, column);
            store_four(call, place, column, value);
        }
    }
}
