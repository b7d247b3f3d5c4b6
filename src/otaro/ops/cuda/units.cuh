// Units of SEFP weights times activations, by the tensor cores.
//
// The weights are the A operand of the tensor cores' 16 × 16 × 8 product, so that a batch of 1 … 8 costs the same.
// Fields never move one by one: one mask takes two neighbouring columns of the upper row out of a word, where they stand
// inside the mantissas of two half floats; rotated by 8 the same mask takes those of the lower row. With an exponent put
// above it, a field v of weight 2^w at bit p of the mantissa is the half float 2^(10-p+w) + 2^w·v. Bits of further planes
// are put right below a nibble, where they have the weight that they should have: one or two of them, for which there is
// room in the mantissa; four are merged to a second nibble first, which the tensor cores add to the first. The powers of
// two and the format's bias are the same for every row, so they are one sum over x that each accumulator starts from.
//
// Operations on integers per weight, loads and products aside: 0.63 at E5M3, 1.16, 1.31, 1.84, 1.75, 2.28 at E5M8.

// Two half floats 2^exponent, into whose mantissas fields are put.
constexpr DEVICE u32 magic(int exponent) { return (u32)((exponent + 15) << 10) * 0x10001u; }

// The sum of the powers of two that stand above the fields of one column.
template <int EXTRA> constexpr DEVICE float column_offset(int step, int pair) {
    float sum = power_of_two(4 + 4 * pair + EXTRA);
    if (EXTRA >= 4) sum += power_of_two(4 + 4 * pair + EXTRA - 4);
    if (EXTRA == 3) sum += power_of_two(10 - single_place(step, pair));
    return sum;
}

// The A operand of one step, from a word of fields at bits `place` and `place - 4` of both rows' two columns.
DEVICE void fields(u32 (&a)[4], u32 word, u32 turned, u32 mask, u32 first, u32 second) {
    a[0] = and_or(word, mask << 4, first);
    a[1] = and_or(turned, mask << 4, first);
    a[2] = and_or(word, mask, second);
    a[3] = and_or(turned, mask, second);
}
template <int WEIGHT> DEVICE void nibble_fields(u32 (&a)[4], u32 word) {
    fields(a, word, rotate_right(word, 8), 0x003C003Cu, magic(4 + WEIGHT), magic(8 + WEIGHT));
}
// Bits that belong below nibbles, `mask` two columns of them, put there from `place` and `place + 4` of a word.
DEVICE void fields_below(u32 (&a)[4], u32 word, int place, u32 mask) {
    const int own = (mask & 1) ? 0 : 1;
    const u32 moved = rotate_right(word, place - own), turned = rotate_right(word, place - own + 8);
    a[0] = and_or(moved, mask << 4, a[0]);
    a[1] = and_or(turned, mask << 4, a[1]);
    a[2] = and_or(moved, mask, a[2]);
    a[3] = and_or(turned, mask, a[3]);
}

// 16 columns of x for one lane's column of B: four steps of two words.
template <int TILES> struct Activations {
    u32 words[TILES][4][8];
    float start[TILES][4][2]; // what the accumulators of a group begin with, by the parity of the column
    float factor[TILES][2];   // what sums of the lane's two columns of the result are multiplied by
};

// What a product is multiplied with: rows of half floats or bfloat16.
struct Source {
    const u16* x; // [batch, columns]
    int batch, columns, bfloat;
};

// Four neighbouring numbers of x, zeros outside of it; ALIGNED where rows begin at multiples of eight bytes.
template <bool ALIGNED> DEVICE void load_four(u32& low, u32& high, const Source& source, int row, int column) {
    const u16* from = source.x + (long long)row * source.columns + column;
    low = high = 0;
    if constexpr (ALIGNED) {
        if (row < source.batch && column < source.columns) {
            uint2 loaded = load_fresh((const uint2*)from);
            low = loaded.x, high = loaded.y;
        }
    } else {
        UNROLL
        for (int j = 0; j < 4; j++)
            if (row < source.batch && column + j < source.columns)
                (j < 2 ? low : high) |= (u32)load_fresh(from + j) << (16 * (j & 1));
    }
}
template <bool ALIGNED> DEVICE void load_unit(u32 (&words)[4][8], const Source& source, int row, int column) {
    UNROLL
    for (int g = 0; g < 4; g++) UNROLL
    for (int s = 0; s < 4; s++)
        load_four<ALIGNED>(words[g][2 * s], words[g][2 * s + 1], source, row, column + 64 * g + 16 * s);
}

// The exponent, as its field in a float, of the power of two that brings the largest of some numbers to [2^14, 2^15).
DEVICE int half_field(float largest) {
    int exponent = bits_of_float(largest) >> 23;
    return exponent == 255 ? 127 : smaller(268 - exponent, 253);
}

// bfloat16 becomes half float times a power of two, such that the largest of a row's 256 lies in [2^14, 2^15): eight
// significant bits are kept down to 2^-31 of it.
DEVICE float scale_bfloats(u32 (&words)[4][8]) {
    float largest = 0;
    UNROLL
    for (int g = 0; g < 4; g++) UNROLL
    for (int j = 0; j < 8; j++) {
        float low = float_of_bits(words[g][j] << 16 & 0x7FFFFFFFu), high = float_of_bits(words[g][j] & 0x7FFF0000u);
        largest = low > largest ? low : largest;
        largest = high > largest ? high : largest;
    }
    UNROLL
    for (int mask = 1; mask <= 2; mask *= 2) {
        float other = shuffle_xor(largest, mask);
        largest = other > largest ? other : largest;
    }
    int field = half_field(largest);
    float scale = float_of_bits((u32)field << 23);
    UNROLL
    for (int g = 0; g < 4; g++) UNROLL
    for (int j = 0; j < 8; j++)
        words[g][j] = halves_of_floats(float_of_bits(words[g][j] << 16) * scale,
                                       float_of_bits(words[g][j] & 0xFFFF0000u) * scale);
    return float_of_bits((u32)(254 - field) << 23);
}

// What follows from words of half floats that are `factor` times too small: sums of their columns, factors of results.
template <int EXTRA, int TILES> DEVICE void prepare_activations(Activations<TILES>& x, int tile, float factor) {
    int own = thread_index() & 3;
    factor *= power_of_two(-2 - EXTRA);
    UNROLL
    for (int j = 0; j < 2; j++) x.factor[tile][j] = shuffle(factor, 4 * (2 * own + j));
    UNROLL
    for (int g = 0; g < 4; g++) {
        float sum = 0;
        UNROLL
        for (int j = 0; j < 8; j++) {
            float offset = format_bias(EXTRA + 3) - column_offset<EXTRA>(j >> 1, j & 1);
            u32 word = x.words[tile][g][j];
            sum += offset * (float_of_half(word & 0xFFFF) + float_of_half(word >> 16));
        }
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        UNROLL
        for (int j = 0; j < 2; j++) x.start[tile][g][j] = shuffle(sum, 4 * (2 * own + j));
    }
}

template <int EXTRA, int TILES> DEVICE void load_activations(Activations<TILES>& x, const Source& source, int unit) {
    int lane = thread_index() & 31, own = lane & 3;
    UNROLL
    for (int tile = 0; tile < TILES; tile++) {
        if ((source.columns & 3) == 0)
            load_unit<true>(x.words[tile], source, 8 * tile + (lane >> 2), 256 * unit + 4 * own);
        else
            load_unit<false>(x.words[tile], source, 8 * tile + (lane >> 2), 256 * unit + 4 * own);
        prepare_activations<EXTRA>(x, tile, source.bfloat ? scale_bfloats(x.words[tile]) : 1.0f);
    }
}

// The sums of one unit: for each tile of eight columns those of rows l/4 and l/4 + 8, columns 2·(l%4) and the next.
template <int EXTRA, int TILES>
DEVICE void multiply_unit(float (&sums)[TILES][4], const Activations<TILES>& x, const u8* base,
                          const u8* const (&bits)[EXTRA + 1], const u8* scale) {
    int lane = thread_index() & 31;
    u32 plane[EXTRA + 1][4];
    UNROLL
    for (int b = 0; b < EXTRA; b++) {
        uint4 loaded = load_shared((const uint4*)bits[b] + lane);
        plane[b][0] = loaded.x, plane[b][1] = loaded.y, plane[b][2] = loaded.z, plane[b][3] = loaded.w;
    }
    uint2 bytes = load_shared((const uint2*)scale + (lane >> 2));
    UNROLL
    for (int tile = 0; tile < TILES; tile++) UNROLL
    for (int j = 0; j < 4; j++) sums[tile][j] = 0;
    UNROLL
    for (int g = 0; g < 4; g++) {
        float total[TILES][4];
        UNROLL
        for (int tile = 0; tile < TILES; tile++) UNROLL
        for (int j = 0; j < 4; j++) total[tile][j] = x.start[tile][g][j & 1];
        auto add = [&](const u32(&a)[4], int s) {
            UNROLL
            for (int tile = 0; tile < TILES; tile++)
                multiply_tile(total[tile], a, x.words[tile][g][2 * s], x.words[tile][g][2 * s + 1], total[tile]);
        };
        u32 a[4], merged[4];
        uint4 loaded = load_shared((const uint4*)(base + 512 * g) + lane);
        u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        if constexpr (EXTRA >= 2) {
            constexpr u32 ODD = 0xAAAAAAAAu, UPPER = 0x33333333u;
            u32 odd = choose(plane[0][g], ODD, plane[1][g] >> 1), even = choose(plane[0][g] << 1, ODD, plane[1][g]);
            merged[0] = even, merged[1] = odd;
            if constexpr (EXTRA >= 4) {
                u32 low_odd = choose(plane[2][g], ODD, plane[3][g] >> 1),
                    low_even = choose(plane[2][g] << 1, ODD, plane[3][g]);
                merged[0] = choose(rotate_right(even, 30), UPPER, low_even);
                merged[1] = choose(rotate_right(odd, 30), UPPER, low_odd);
                merged[2] = choose(even, UPPER, rotate_right(low_even, 2));
                merged[3] = choose(odd, UPPER, rotate_right(low_odd, 2));
            }
        }
        UNROLL
        for (int s = 0; s < 4; s++) {
            nibble_fields<EXTRA>(a, words[s]);
            if constexpr (EXTRA == 1) fields_below(a, plane[0][g], single_place(s, 1), 0x00020002u);
            if constexpr (EXTRA == 2 || EXTRA == 3) fields_below(a, merged[s & 1], double_place(s, 1), 0x00030003u);
            add(a, s);
            if constexpr (EXTRA >= 4) {
                nibble_fields<EXTRA - 4>(a, merged[s]);
                if constexpr (EXTRA == 5) fields_below(a, plane[4][g], single_place(s, 1), 0x00020002u);
                add(a, s);
            }
            if constexpr (EXTRA == 3) {
                const int second = single_place(s, 1);
                const u32 word = plane[2][g];
                fields(a, word, rotate_right(word, 8), 0x00010001u << second, magic(6 - second), magic(10 - second));
                add(a, s);
            }
        }
        // Bytes of the two rows, each the upper half of a half float.
        u32 halves = permute(g < 2 ? bytes.x : bytes.y, 0, g & 1 ? 0x3424 : 0x1404);
        float upper = float_of_half(halves & 0xFFFF), lower = float_of_half(halves >> 16);
        UNROLL
        for (int tile = 0; tile < TILES; tile++) UNROLL
        for (int j = 0; j < 4; j++)
            sums[tile][j] = fused_multiply_add(j < 2 ? upper : lower, total[tile][j], sums[tile][j]);
    }
}
