// Products with SEFP weights of the nested scheme, at a batch of 1 … 16.
//
// The weights are the A operand of the tensor cores' 16 × 16 × 8 product, so that a batch of 1 … 8 costs the same.
// Fields never move one by one: one mask takes two neighbouring columns of the upper row out of a word, where they stand
// inside the mantissas of two half floats; rotated by 8 the same mask takes those of the lower row. With an exponent put
// above it, a field v of weight 2^w at bit p of the mantissa is the half float 2^(10-p+w) + 2^w·v. The tensor cores add
// up all fields of a code; the powers of two and the format's bias are the same for every row, so they are one sum over
// x that each accumulator starts from. Narrow fields are merged first where that is cheaper: two planes to fields of
// two bits, four planes to a second nibble.
//
// Operations on integers per weight, loads and products aside: 0.63 at E5M3, 1.16, 1.31, 1.84, 1.75, 2.28 at E5M8.
//
// A block takes `warps` units side by side, one for each of its warps, which keep their part of x in registers, and walks
// down the tiles of 16 rows; wider weights take several rounds over the same tiles. Bytes come through a ring of stages
// in shared memory, copied in large blocks. Warps wait for their bytes alone, not for each other. They take turns to
// look after a stage that all have read, a step or two later: to have it filled again, and to sum up what all found,
// always in the same order: equal calls give equal bits.

constexpr int MOST_STAGES = 16, MOST_SUMS = 16, MOST_UNITS = 128, HEAD_BYTES = 1024;

struct Matvec {
    Planes planes;
    const u16 *x, *bias; // [batch, columns], [rows] or none
    u16* y;              // [batch, rows]
    const int* mantissa; // in device memory, for the form that reads its width there
    int batch, bfloat, stored;
    int warps, rounds;       // units side by side, and how often
    int tiles, stages;       // tiles of a stage, and how many stages the widest width has room for
    int stage_memory;        // bytes of all stages
    int sums;                // stages' tiles whose sums there is room for, a power of two
    int lag;                 // how many steps later a stage is looked after, at most `sums` and the stages
    int warm;
    int share, rest;          // tiles of a block, and how many blocks have one more
    int gated;                // rows of y where it is silu(gate) · up, else 0
    Stream stream;            // one row of which x is the norm, instead of x
};

// Two half floats 2^exponent, into whose mantissas fields are put.
constexpr DEVICE u32 magic(int exponent) { return (u32)((exponent + 15) << 10) * 0x10001u; }

// The sum of the powers of two that stand above the fields of one column.
template <int EXTRA> constexpr DEVICE float column_offset(int step, int pair) {
    float sum = power_of_two(4 + 4 * pair + EXTRA);
    if (EXTRA == 2 || EXTRA == 3) sum += power_of_two(10 - double_place(step, pair) + EXTRA - 2);
    if (EXTRA >= 4) sum += power_of_two(4 + 4 * pair + EXTRA - 4);
    if (EXTRA & 1) sum += power_of_two(10 - single_place(step, pair));
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

// 16 columns of x for one lane's column of B: four steps of two words.
template <int TILES> struct Activations {
    u32 words[TILES][4][8];
    float start[TILES][4][2]; // what the accumulators of a group begin with
    float factor[TILES][2];   // what sums of the lane's two columns of the result are multiplied by
};

// Four neighbouring numbers of x, zeros outside of it; ALIGNED where rows begin at multiples of eight bytes.
template <bool ALIGNED> DEVICE void load_four(u32& low, u32& high, const Matvec& call, int row, int column) {
    const u16* from = call.x + (long long)row * call.planes.columns + column;
    low = high = 0;
    if constexpr (ALIGNED) {
        if (row < call.batch && column < call.planes.columns) {
            uint2 loaded = load_fresh((const uint2*)from);
            low = loaded.x, high = loaded.y;
        }
    } else {
        UNROLL
        for (int j = 0; j < 4; j++)
            if (row < call.batch && column + j < call.planes.columns)
                (j < 2 ? low : high) |= (u32)load_fresh(from + j) << (16 * (j & 1));
    }
}
template <bool ALIGNED> DEVICE void load_unit(u32 (&words)[4][8], const Matvec& call, int row, int column) {
    UNROLL
    for (int g = 0; g < 4; g++) UNROLL
    for (int s = 0; s < 4; s++)
        load_four<ALIGNED>(words[g][2 * s], words[g][2 * s + 1], call, row, column + 64 * g + 16 * s);
}
DEVICE bool aligned(const Matvec& call) { return (call.planes.columns & 3) == 0; }

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
    int exponent = bits_of_float(largest) >> 23;
    int field = exponent == 255 ? 127 : smaller(268 - exponent, 253);
    float scale = float_of_bits((u32)field << 23);
    UNROLL
    for (int g = 0; g < 4; g++) UNROLL
    for (int j = 0; j < 8; j++)
        words[g][j] = halves_of_floats(float_of_bits(words[g][j] << 16) * scale,
                                       float_of_bits(words[g][j] & 0xFFFF0000u) * scale);
    return float_of_bits((u32)(254 - field) << 23);
}

// A unit's columns of x on their way: of one row a lane has eight, asked for long before they are needed; of more rows
// they are loaded where they are needed.
template <int COLUMNS> struct Incoming {
    u32 words[COLUMNS == 1 ? 4 : 1];
    float factor; // of the norm

    template <bool ALIGNED> DEVICE void load(const Matvec& call, int column) {
        load_four<ALIGNED>(words[0], words[1], call, 0, column);
        load_four<ALIGNED>(words[2], words[3], call, 0, column + 128);
    }
    DEVICE void ask(const Matvec& call, int unit) {
        if constexpr (COLUMNS == 1) {
            if (call.stream.x != nullptr) {
                float value[8], weight[8];
                load_norm(weight, call.stream, call.planes.columns, unit);
                load_stream(value, call.stream, 0, call.planes.columns, unit);
                return normed_words(words, value, factor, weight, call.bfloat);
            }
            int column = 256 * unit + 4 * (thread_index() & 31);
            aligned(call) ? load<true>(call, column) : load<false>(call, column);
        }
    }
    // The words of a lane; of one row all columns of B are the same.
    DEVICE void take(u32 (&taken)[4][8], const Matvec& call, int unit, int tile) const {
        int lane = thread_index() & 31, own = lane & 3;
        if constexpr (COLUMNS > 1) {
            int row = 8 * tile + (lane >> 2), column = 256 * unit + 4 * own;
            aligned(call) ? load_unit<true>(taken, call, row, column) : load_unit<false>(taken, call, row, column);
        } else {
            UNROLL
            for (int g = 0; g < 4; g++) UNROLL
            for (int j = 0; j < 8; j++)
                taken[g][j] = shuffle_word(words[(g & 2) + (j & 1)], 16 * (g & 1) + 4 * (j >> 1) + own);
        }
    }
};

// What there is of x at first. Of a stream every block makes the norm; the first of them keeps the new stream.
template <int COLUMNS> DEVICE void begin_activations(Incoming<COLUMNS>& incoming, const Matvec& call, float* squares) {
    const int warp = thread_index() >> 5, columns = call.planes.columns;
    if (COLUMNS > 1 || call.stream.x == nullptr) {
        await_previous_kernel();
        return incoming.ask(call, warp);
    }
    if constexpr (COLUMNS == 1) {
        float value[8], weight[8];
        load_norm(weight, call.stream, columns, warp);
        await_previous_kernel();
        for (int unit = warp; unit < call.planes.units; unit += call.warps) {
            load_stream(value, call.stream, 0, columns, unit);
            const float sum = unit_squares(value);
            if ((thread_index() & 31) == 0) store_shared(squares + unit, sum);
            if (block_index() == 0 && call.stream.delta != nullptr) keep_stream(value, call.stream, 0, columns, unit);
        }
        synchronize_block();
        incoming.factor = norm_factor(squares, call.planes.units, call.stream);
        if (call.rounds > 1) return incoming.ask(call, warp);
        normed_words(incoming.words, value, incoming.factor, weight, call.bfloat);
    }
}

// What is to be taken from the sum over a column's fields for each number of x, in two half floats, twice: its first eleven
// bits, or those after them.
template <int EXTRA> DEVICE u32 offset_halves(int step, int pair, bool rest) {
    float value = column_offset<EXTRA>(step, pair) - format_bias(EXTRA + 3);
    if (rest) value -= float_of_bits(bits_of_float(value) & 0xFFFFE000u);
    return value == 0 ? 0 : ((bits_of_float(value) >> 13) - (112u << 10) + 0x8000u) * 0x10001u;
}

template <int EXTRA, int COLUMNS, int TILES>
DEVICE void take_activations(Activations<TILES>& x, const Incoming<COLUMNS>& incoming, const Matvec& call, int unit) {
    int own = thread_index() & 3;
    UNROLL
    for (int tile = 0; tile < TILES; tile++) {
        incoming.take(x.words[tile], call, unit, tile);
        float factor = call.bfloat ? scale_bfloats(x.words[tile]) : 1.0f;
        factor *= power_of_two(-2 - EXTRA);
        UNROLL
        for (int j = 0; j < 2; j++) x.factor[tile][j] = shuffle(factor, 4 * (2 * own + j));
        UNROLL
        for (int g = 0; g < 4; g++) {
            float start[4] = {0, 0, 0, 0};
            UNROLL
            for (int j = 0; j < 8; j++) {
                const int step = j >> 1, rest = j & 1;
                const u32 first = offset_halves<EXTRA>(step, 0, rest), second = offset_halves<EXTRA>(step, 1, rest);
                const u32 a[4] = {first, first, second, second};
                if (first != 0 || second != 0)
                    multiply_tile(start, a, x.words[tile][g][2 * step], x.words[tile][g][2 * step + 1], start);
            }
            x.start[tile][g][0] = start[0], x.start[tile][g][1] = start[1];
        }
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
        u32 a[4];
        uint4 loaded = load_shared((const uint4*)(base + 512 * g) + lane);
        u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        UNROLL
        for (int s = 0; s < 4; s++) {
            nibble_fields<EXTRA>(a, words[s]);
            add(a, s);
        }
        if constexpr (EXTRA >= 2) {
            constexpr u32 ODD = 0xAAAAAAAAu, UPPER = 0x33333333u;
            u32 odd = choose(plane[0][g], ODD, plane[1][g] >> 1), even = choose(plane[0][g] << 1, ODD, plane[1][g]);
            if constexpr (EXTRA < 4) {
                u32 merged[2] = {even, odd}, turned[2] = {rotate_right(even, 8), rotate_right(odd, 8)};
                UNROLL
                for (int s = 0; s < 4; s++) {
                    int second = double_place(s, 1);
                    fields(a, merged[s & 1], turned[s & 1], 0x00030003u << second, magic(6 - second + EXTRA - 2),
                           magic(10 - second + EXTRA - 2));
                    add(a, s);
                }
            } else {
                u32 low_odd = choose(plane[2][g], ODD, plane[3][g] >> 1),
                    low_even = choose(plane[2][g] << 1, ODD, plane[3][g]);
                u32 merged[4] = {
                    choose(rotate_right(even, 30), UPPER, low_even), choose(rotate_right(odd, 30), UPPER, low_odd),
                    choose(even, UPPER, rotate_right(low_even, 2)), choose(odd, UPPER, rotate_right(low_odd, 2))};
                UNROLL
                for (int s = 0; s < 4; s++) {
                    nibble_fields<EXTRA - 4>(a, merged[s]);
                    add(a, s);
                }
            }
        }
        if constexpr (EXTRA & 1) {
            u32 word = plane[EXTRA - 1][g], turned = rotate_right(word, 8);
            UNROLL
            for (int s = 0; s < 4; s++) {
                int second = single_place(s, 1);
                fields(a, word, turned, 0x00010001u << second, magic(6 - second), magic(10 - second));
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

// At the beginning of shared memory; the ring of stages and sums of the warps follow.
struct Head {
    u64 filled[MOST_STAGES], emptied[MOST_STAGES], summed[MOST_SUMS]; // barriers
    float squares[MOST_UNITS];                                         // of the stream, unit by unit
};

// A step of a block's work: tiles of a stage in one of the rounds. Tiles that there is room for sums of go through all
// rounds before the next ones.
struct Step {
    int round, sums, tile, count;
};

template <int EXTRA, int COLUMNS> struct Block {
    static constexpr int UNIT = UNIT_BASE + EXTRA * UNIT_BITS + UNIT_SCALE;
    static constexpr int PARTS = EXTRA + 2;   // the base, the planes, the scales
    static constexpr int SUMS = 16 * COLUMNS; // floats of a tile's results
    static_assert(sizeof(Head) <= HEAD_BYTES);

    DEVICE static Head& head() { return *(Head*)shared_memory(); }
    // The sums of a stage's tiles: those of each warp, tile by tile.
    DEVICE static float* sums(const Matvec& call, int sums) {
        return (float*)(shared_memory() + HEAD_BYTES + call.stage_memory) + sums * call.tiles * call.warps * SUMS;
    }
    // Units of a stage.
    DEVICE static int units(const Matvec& call) { return call.tiles * call.warps; }
    DEVICE static int begin(const Matvec& call) {
        return block_index() * call.share + smaller(block_index(), call.rest);
    }
    DEVICE static int tiles(const Matvec& call) { return call.share + (block_index() < call.rest); }
    DEVICE static int steps(const Matvec& call) {
        return call.tiles == 1 ? tiles(call) * call.rounds : quotient(tiles(call) + call.tiles - 1, call.tiles);
    }
    DEVICE static Step step(const Matvec& call, int number) {
        Step step = {0, number & (call.sums - 1), 0, 0};
        int before = number; // stages' tiles
        if (call.rounds > 1) {
            const int all = tiles(call); // one of them in a stage
            const int done = quotient(number, call.sums * call.rounds) * call.sums;
            const int there = smaller(call.sums, all - done), rest = number - done * call.rounds;
            step.round = quotient(rest, there), step.sums = rest - step.round * there;
            before = done + step.sums;
        }
        step.tile = begin(call) + before * call.tiles;
        step.count = call.tiles == 1 ? 1 : smaller(call.tiles, tiles(call) - before * call.tiles);
        return step;
    }

    // One warp: the barriers, and the first copies.
    DEVICE static void prepare(const Matvec& call) {
        const int lane = thread_index() & 31, count = call.stages;
        if (lane < count) {
            barrier_init(&head().filled[lane], 1);
            barrier_init(&head().emptied[lane], call.warps);
        }
        if (lane < call.sums) barrier_init(&head().summed[lane], 1);
        barriers_ready();
        synchronize_warp();
        const int first = smaller(count, steps(call));
        if (lane < first) barrier_expect(&head().filled[lane], bytes(call, step(call, lane)));
        synchronize_warp();
        NO_UNROLL
        for (int copy = lane; copy < first * PARTS; copy += 32)
            fetch(call, step(call, copy / PARTS), copy / PARTS, copy % PARTS);
    }

    DEVICE static int part_size(int index) { return index == 0 ? UNIT_BASE : index > EXTRA ? UNIT_SCALE : UNIT_BITS; }

    // Where a stage keeps what its units have of the base, a plane or the scales.
    DEVICE static u8* part(const Matvec& call, int slot, int index) {
        int before = index == 0 ? 0 : UNIT_BASE + (index - 1) * UNIT_BITS;
        return shared_memory() + HEAD_BYTES + units(call) * (slot * UNIT + before);
    }

    DEVICE static int units_of(const Matvec& call, const Step& step) {
        return smaller(call.warps, call.planes.units - step.round * call.warps) * step.count;
    }
    DEVICE static int bytes(const Matvec& call, const Step& step) { return units_of(call, step) * UNIT; }
    // Copies the base, a plane or the scales of a step into a stage that nobody reads any more.
    DEVICE static void fetch(const Matvec& call, const Step& step, int slot, int index) {
        const int unit = step.round * call.warps, size = part_size(index);
        const u8* from = index == 0      ? call.planes.base
                         : index > EXTRA ? call.planes.scale
                                         : call.planes.bits[index - 1];
        from += ((long long)step.tile * call.planes.units + unit) * size;
        copy_to_shared(part(call, slot, index), from, units_of(call, step) * size, &head().filled[slot]);
    }

    DEVICE static void store_result(const Matvec& call, int tile, int row, int column, float value) {
        row += 16 * tile;
        if (row >= call.planes.rows || column >= call.batch) return;
        if (call.bias != nullptr) {
            u32 bits = load_global(call.bias + row);
            value += call.bfloat ? float_of_bits(bits << 16) : float_of_half(bits);
        }
        u32 rounded = call.bfloat ? bfloats_of_floats(value, 0) : halves_of_floats(value, 0);
        store_global(call.y + (long long)column * call.planes.rows + row, (u16)rounded);
    }

    // A tile's results lie as the lanes hold them: [2 rows' parts][...] of each lane, or the 16 rows of one column.
    DEVICE static void store_results(const Matvec& call, int tile, int lane, int j, float value) {
        if constexpr (COLUMNS == 1)
            store_result(call, tile, lane, 0, value);
        else
            store_result(call, tile, (lane >> 2) + 4 * (j & 2), 8 * (j >> 2) + 2 * (lane & 3) + (j & 1), value);
    }

    // Of a tile whose upper eight rows are gates and whose lower eight are what they let through.
    DEVICE static void store_gated(const Matvec& call, int tile, int row, int column, float gate, float up) {
        const int place = 8 * tile + row;
        if (place >= call.gated || column >= call.batch) return;
        if (call.bias != nullptr) {
            u32 first = load_global(call.bias + 16 * tile + row), second = load_global(call.bias + 16 * tile + row + 8);
            gate += call.bfloat ? float_of_bits(first << 16) : float_of_half(first);
            up += call.bfloat ? float_of_bits(second << 16) : float_of_half(second);
        }
        float value = gate / (1.0f + exponential(-gate)) * up;
        u32 rounded = call.bfloat ? bfloats_of_floats(value, 0) : halves_of_floats(value, 0);
        store_global(call.y + (long long)column * call.gated + place, (u16)rounded);
    }

    // The same of all that a warp's lanes hold; of one column, lanes from 16 on hold it again.
    template <int HELD>
    DEVICE static void store_gates(const Matvec& call, int tile, int lane, const float (&sums)[HELD]) {
        if constexpr (COLUMNS == 1) {
            float up = shuffle_xor(sums[0], 8);
            if (lane < 8) store_gated(call, tile, lane, 0, sums[0], up);
        } else {
            UNROLL
            for (int j = 0; j < HELD; j++)
                if ((j & 2) == 0)
                    store_gated(call, tile, lane >> 2, 8 * (j >> 2) + 2 * (lane & 3) + (j & 1), sums[j], sums[j | 2]);
        }
    }
};

// One warp: what all have found of a stage's tiles becomes results.
template <int EXTRA, int COLUMNS> DEVICE void sum_up(const Matvec& call, const Step& step) {
    constexpr int TILES = COLUMNS > 8 ? 2 : 1, HELD = COLUMNS == 1 ? 1 : 4 * TILES;
    using Block = Block<EXTRA, COLUMNS>;
    const int lane = thread_index() & 31;
    NO_UNROLL
    for (int t = 0; t < step.count; t++) {
        float sums[HELD];
        UNROLL
        for (int j = 0; j < HELD; j++) sums[j] = 0;
        const float* from = Block::sums(call, step.sums) + t * call.warps * Block::SUMS;
        for (int warp = 0; warp < call.warps; warp++, from += Block::SUMS) {
            if constexpr (COLUMNS == 1) {
                sums[0] += load_shared(from + (lane & 15));
            } else {
                UNROLL
                for (int n = 0; n < TILES; n++) {
                    float4 part = load_shared((const float4*)from + n * 32 + lane);
                    sums[4 * n] += part.x, sums[4 * n + 1] += part.y, sums[4 * n + 2] += part.z,
                        sums[4 * n + 3] += part.w;
                }
            }
        }
        if (call.gated != 0) {
            Block::store_gates(call, step.tile + t, lane, sums);
        } else if (COLUMNS > 1 || lane < 16) {
            UNROLL
            for (int j = 0; j < HELD; j++) Block::store_results(call, step.tile + t, lane, j, sums[j]);
        }
    }
}

// One warp: looks after a stage and the sums of a step, as soon as all have read it.
template <int EXTRA, int COLUMNS> DEVICE void look_after(const Matvec& call, int number, int slot, u32 phase) {
    using Block = Block<EXTRA, COLUMNS>;
    const int stages = call.stages, lane = thread_index() & 31;
    const bool more = number + stages < Block::steps(call);
    const Step next = Block::step(call, more ? number + stages : number);
    barrier_wait(&Block::head().emptied[slot], phase);
    if (more) {
        if (lane == 0) barrier_expect(&Block::head().filled[slot], Block::bytes(call, next));
        synchronize_warp();
        if (lane < Block::PARTS) Block::fetch(call, next, slot, lane);
    }
    const Step step = Block::step(call, number);
    if (step.round + 1 < call.rounds) return;
    sum_up<EXTRA, COLUMNS>(call, step);
    synchronize_warp();
    if (lane == 0) barrier_arrive(&Block::head().summed[step.sums]);
}

template <int EXTRA, int COLUMNS> DEVICE void matvec(const Matvec& call) {
    constexpr int TILES = COLUMNS > 8 ? 2 : 1;
    using Block = Block<EXTRA, COLUMNS>;
    const int warp = thread_index() >> 5, lane = thread_index() & 31;
    if (warp == 0) Block::prepare(call);
    start_next_kernel();
    const int stages = call.stages, steps = Block::steps(call);
    Incoming<COLUMNS> incoming;
    Activations<TILES> x;
    int round = 0, sums = 0, slot = 0, own = warp; // `own` is the next step that this warp looks after
    int there = smaller(call.sums, call.rounds > 1 ? Block::tiles(call) : steps);
    u32 phase = 0, turn = 1;
    // Before x is there a step without meaning is made, so that the instructions are at hand when it is.
    for (int number = -call.warm; number < steps + call.lag; number++) {
        const int unit = round * call.warps + warp;
        if (number >= 0 && sums == 0 && (call.rounds > 1 || number == 0) && number < steps) {
            if (number == 0) {
                begin_activations(incoming, call, Block::head().squares);
                synchronize_block();
            }
            if (unit < call.planes.units) {
                take_activations<EXTRA>(x, incoming, call, unit);
                if (call.rounds > 1)
                    incoming.ask(call, unit + call.warps < call.planes.units ? unit + call.warps : warp);
            }
        }
        if (number - call.lag == own) {
            const int before = slot - call.lag;
            look_after<EXTRA, COLUMNS>(call, own, before < 0 ? before + stages : before, phase ^ (before < 0));
            own += call.warps;
        }
        if (number >= steps) { // only what is left to look after
            if (++slot == stages) slot = 0, phase ^= 1;
            continue;
        }
        int count = unit < call.planes.units;
        if (number >= 0) {
            if (round == 0) barrier_wait(&Block::head().summed[sums], turn);
            barrier_wait(&Block::head().filled[slot], phase);
            if (call.tiles > 1) count = smaller(call.tiles, Block::tiles(call) - number * call.tiles); // all in one round
        }
        NO_UNROLL
        for (int t = 0; t < count; t++) {
            const int place = t * call.warps + warp;
            const u8* bits[EXTRA + 1];
            UNROLL
            for (int b = 0; b < EXTRA; b++) bits[b] = Block::part(call, slot, b + 1) + place * UNIT_BITS;
            float sum[TILES][4];
            multiply_unit<EXTRA>(sum, x, Block::part(call, slot, 0) + place * UNIT_BASE, bits,
                                 Block::part(call, slot, EXTRA + 1) + place * UNIT_SCALE);
            float* to = Block::sums(call, sums) + place * Block::SUMS;
            UNROLL
            for (int n = 0; n < TILES; n++) {
                float4 scaled = {sum[n][0] * x.factor[n][0], sum[n][1] * x.factor[n][1],
                                 sum[n][2] * x.factor[n][0], sum[n][3] * x.factor[n][1]};
                if constexpr (COLUMNS > 1) {
                    float4* own = (float4*)to + n * 32 + lane;
                    if (round > 0) {
                        float4 before = load_shared(own);
                        scaled.x += before.x, scaled.y += before.y;
                        scaled.z += before.z, scaled.w += before.w;
                    }
                    store_shared(own, scaled);
                } else if ((lane & 3) == 0) {
                    float* own = to + (lane >> 2);
                    if (round > 0) scaled.x += load_shared(own), scaled.z += load_shared(own + 8);
                    store_shared(own, scaled.x);
                    store_shared(own + 8, scaled.z);
                }
            }
        }
        if (number < 0) continue;
        synchronize_warp();
        if (lane == 0) barrier_arrive(&Block::head().emptied[slot]);
        if (++slot == stages) slot = 0, phase ^= 1;
        if (++sums < there) continue;
        sums = 0;
        if (++round < call.rounds) continue;
        round = 0, turn ^= 1;
        const int left = steps - number - 1;
        there = smaller(call.sums, call.rounds > 1 ? quotient(left, call.rounds) : left);
    }
}

// The width is read when the kernel runs: one captured graph serves every width.
template <int COLUMNS> DEVICE void matvec_any(const Matvec& call) {
    await_previous_kernel();
    int extra = load_fresh(call.mantissa) - 3;
    switch (extra < 0 ? 0 : smaller(extra, call.stored - 3)) {
    case 0: return matvec<0, COLUMNS>(call);
    case 1: return matvec<1, COLUMNS>(call);
    case 2: return matvec<2, COLUMNS>(call);
    case 3: return matvec<3, COLUMNS>(call);
    case 4: return matvec<4, COLUMNS>(call);
    default: return matvec<5, COLUMNS>(call);
    }
}

#ifdef OTARO_COLUMNS
KERNEL __launch_bounds__(OTARO_THREADS, 1) matvec_kernel(PARAMETER Matvec call) {
#    if OTARO_EXTRA >= 0
    matvec<OTARO_EXTRA, OTARO_COLUMNS>(call);
#    else
    matvec_any<OTARO_COLUMNS>(call);
#    endif
}
#endif
