// The values of SEFP weights of the nested scheme: whole matrices, or rows by their numbers.
//
// Rows are looked up a word at a time. Whole matrices, before a product with many rows of x, are as much memory traffic
// as that: a warp takes a unit, loads 16 bytes of a plane a lane, and every 32 bytes it writes are four lanes'.

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

// Four neighbouring weights of a row from words that hold them; `byte` is their scale.
template <typename Words>
DEVICE void four_values(float (&value)[4], u32 base, const Words& bits, int extra, int step, int lower, u32 byte) {
    float size = float_of_half(byte << 8) * float_of_bits((u32)(125 - extra) << 23), bias = format_bias(extra + 3);
    UNROLL
    for (int pair = 0; pair < 2; pair++) {
        u32 codes = two_codes(base, bits, extra, step, pair, lower);
        UNROLL
        for (int j = 0; j < 2; j++) {
            // A code below 2^23 in the mantissa of 2^23: converting integers is slow.
            float code = float_of_bits(0x4B000000u | (j ? codes >> 16 : codes & 0xFFFF)) - 8388608.0f;
            value[2 * pair + j] = multiply(code + bias, size);
        }
    }
}

DEVICE void decode_four(float (&value)[4], const Planes& planes, int extra, long long row, int column) {
    int g = (column >> 6) & 3, s = (column >> 4) & 3, lane = (int)(row & 7) * 4 + ((column >> 2) & 3);
    int lower = (int)(row >> 3) & 1;
    long long unit = (row >> 4) * planes.units + (column >> 8);
    u32 base = load_global((const u32*)(planes.base + unit * UNIT_BASE) + g * 128 + lane * 4 + s), bits[MOST_EXTRA];
    UNROLL
    for (int b = 0; b < MOST_EXTRA; b++)
        if (b < extra) bits[b] = load_global((const u32*)(planes.bits[b] + unit * UNIT_BITS) + lane * 4 + g);
    u32 byte = load_global(planes.scale + unit * UNIT_SCALE + (row & 7) * 8 + g * 2 + lower);
    four_values(value, base, bits, extra, s, lower, byte);
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

// One warp: all weights of a unit.
template <int EXTRA> DEVICE void decode_unit(const Decode& call, long long unit) {
    const Planes& planes = call.planes;
    const int lane = thread_index() & 31, own = lane & 3;
    const long long first_row = unit / planes.units * 16 + (lane >> 2);
    const int first_column = (int)(unit % planes.units) * 256 + 4 * own;
    u32 plane[4][MOST_EXTRA], base[4][4];
    UNROLL
    for (int b = 0; b < EXTRA; b++) {
        uint4 loaded = load_global((const uint4*)(planes.bits[b] + unit * UNIT_BITS) + lane);
        plane[0][b] = loaded.x, plane[1][b] = loaded.y, plane[2][b] = loaded.z, plane[3][b] = loaded.w;
    }
    UNROLL
    for (int g = 0; g < 4; g++) {
        uint4 loaded = load_global((const uint4*)(planes.base + unit * UNIT_BASE) + 32 * g + lane);
        base[g][0] = loaded.x, base[g][1] = loaded.y, base[g][2] = loaded.z, base[g][3] = loaded.w;
    }
    const uint2 scales = load_global((const uint2*)(planes.scale + unit * UNIT_SCALE) + (lane >> 2));
    UNROLL
    for (int lower = 0; lower < 2; lower++) {
        const long long row = first_row + 8 * lower;
        if (row >= planes.rows) return;
        UNROLL
        for (int g = 0; g < 4; g++) UNROLL
        for (int s = 0; s < 4; s++) {
            const int column = first_column + 64 * g + 16 * s;
            if (column >= planes.columns) continue;
            float value[4];
            u32 byte = (g < 2 ? scales.x : scales.y) >> (16 * (g & 1) + 8 * lower) & 0xFF;
            four_values(value, base[g][s], plane[g], EXTRA, s, lower, byte);
            store_four(call, row, column, value);
        }
    }
}

template <int EXTRA> DEVICE void decode_units(const Decode& call) {
    const int warps = block_threads() / 32;
    const long long units = (long long)((call.planes.rows + 15) / 16) * call.planes.units;
    for (long long unit = (long long)block_index() * warps + thread_index() / 32; unit < units;
         unit += (long long)grid_blocks() * warps)
        decode_unit<EXTRA>(call, unit);
}

// Of a whole matrix a warp takes units; of rows a block takes one at a time, a thread four neighbouring columns. Rows
// outside of the matrix become NaN.
KERNEL decode_kernel(PARAMETER Decode call) {
    if (call.ids == nullptr) {
        switch (call.extra) {
        case 0: return decode_units<0>(call);
        case 1: return decode_units<1>(call);
        case 2: return decode_units<2>(call);
        case 3: return decode_units<3>(call);
        case 4: return decode_units<4>(call);
        default: return decode_units<5>(call);
        }
    }
    for (long long place = block_index(); place < call.count; place += grid_blocks()) {
        long long row = load_global(call.ids + place);
        for (int column = 4 * thread_index(); column < call.planes.columns; column += 4 * block_threads()) {
            const float nan = float_of_bits(0x7FC00000u);
            float value[4] = {nan, nan, nan, nan};
            if (row >= 0 && row < call.planes.rows) decode_four(value, call.planes, call.extra, row, column);
            store_four(call, place, column, value);
        }
    }
}
