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
// A block takes `warps` units side by side, one for each warp, which keeps its part of x in registers, and walks down
// the tiles of 16 rows; bytes come through a ring of stages in shared memory, copied in large blocks. Sums over warps go
// through shared memory, over the blocks of a cluster (which divide the columns) through theirs, always in the same
// order: equal calls give equal bits.
//
// A batch of 1 needs few registers for x, so there is room for four more warps, which copy and sum up; the others wait
// for nothing but their bytes. They ask for no more than about half of the ring at a time: stages that are asked for
// together come nearly together, and the first should come early. With more rows of x the block's warps wait for each
// other after every stage and do this in turn.

constexpr int MOST_STAGES = 16, SHARE_BYTES = 2 * 8 * MOST_STAGES, HEAD_BYTES = SHARE_BYTES + 128;
constexpr DEVICE int helpers_of(int columns) { return columns == 1 ? 4 : 0; }

struct Matvec {
    Planes planes;
    const u16 *x, *bias; // [batch, columns], [rows] or none
    u16* y;              // [batch, rows]
    const int* mantissa; // in device memory, for the form that reads its width there
    int batch, bfloat, stored;
    int split, warps, tiles_per_stage, stage_memory; // blocks of a cluster; warps, tiles and bytes of a block
    int stages[MOST_EXTRA + 1];                      // of the ring, at each width
    int share, rest;                                 // tiles of a cluster, and how many clusters have one more
    int gated;                                       // rows of y where it is silu(gate) · up, else 0
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
//
// At a batch of 1 the first four columns of B are the four groups of a unit, not rows of x. Then each group's product
// with all of B has its own sum in its own column, and words and beginnings of one group serve all four.
template <int COLUMNS> struct Activations {
    static constexpr int TILES = COLUMNS > 8 ? 2 : 1, GROUPS = COLUMNS == 1 ? 1 : 4;
    u32 words[TILES][GROUPS][8];
    float start[TILES][GROUPS][4]; // what the accumulators of a group begin with
    float factor[TILES][2];        // what sums of the lane's two columns of the result are multiplied by
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
template <bool ALIGNED, int GROUPS>
DEVICE void load_unit(u32 (&words)[GROUPS][8], const Matvec& call, int row, int column) {
    UNROLL
    for (int g = 0; g < GROUPS; g++) UNROLL
    for (int s = 0; s < 4; s++)
        load_four<ALIGNED>(words[g][2 * s], words[g][2 * s + 1], call, row, column + 64 * g + 16 * s);
}

// bfloat16 becomes half float times a power of two, such that the largest of a row's 256 lies in [2^14, 2^15): eight
// significant bits are kept down to 2^-31 of it.
template <int GROUPS> DEVICE float scale_bfloats(u32 (&words)[GROUPS][8]) {
    float largest = 0;
    UNROLL
    for (int g = 0; g < GROUPS; g++) UNROLL
    for (int j = 0; j < 8; j++) {
        float low = float_of_bits(words[g][j] << 16 & 0x7FFFFFFFu), high = float_of_bits(words[g][j] & 0x7FFF0000u);
        largest = low > largest ? low : largest;
        largest = high > largest ? high : largest;
    }
    UNROLL
    for (int mask = 1; mask <= 8 / GROUPS; mask *= 2) {
        float other = shuffle_xor(largest, mask);
        largest = other > largest ? other : largest;
    }
    int exponent = bits_of_float(largest) >> 23;
    int field = exponent == 255 ? 127 : smaller(268 - exponent, 253);
    float scale = float_of_bits((u32)field << 23);
    UNROLL
    for (int g = 0; g < GROUPS; g++) UNROLL
    for (int j = 0; j < 8; j++)
        words[g][j] = halves_of_floats(float_of_bits(words[g][j] << 16) * scale,
                                       float_of_bits(words[g][j] & 0xFFFF0000u) * scale);
    return float_of_bits((u32)(254 - field) << 23);
}

template <int EXTRA, int COLUMNS> DEVICE void load_activations(Activations<COLUMNS>& x, const Matvec& call, int unit) {
    const int lane = thread_index() & 31, own = lane & 3;
    UNROLL
    for (int tile = 0; tile < x.TILES; tile++) {
        // Rows that do not exist are zeros.
        int row = COLUMNS == 1 ? lane >> 4 : 8 * tile + (lane >> 2);
        int column = 256 * unit + 4 * own + (COLUMNS == 1 ? 16 * (lane & 12) : 0);
        if ((call.planes.columns & 3) == 0)
            load_unit<true>(x.words[tile], call, row, column);
        else
            load_unit<false>(x.words[tile], call, row, column);
        float factor = call.bfloat ? scale_bfloats(x.words[tile]) : 1.0f;
        factor *= power_of_two(-2 - EXTRA);
        UNROLL
        for (int j = 0; j < 2; j++) x.factor[tile][j] = shuffle(factor, 4 * (2 * own + j));
        UNROLL
        for (int g = 0; g < x.GROUPS; g++) {
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
            for (int j = 0; j < 4; j++) x.start[tile][g][j] = shuffle(sum, 4 * (2 * own + (j & 1)));
        }
    }
}

// The sums of one unit: for each tile of eight columns those of rows l/4 and l/4 + 8, columns 2·(l%4) and the next. At a
// batch of 1 sums[0][0] and sums[0][2] of lanes with l%4 == 1 are the two rows' sums.
template <int EXTRA, int COLUMNS, int TILES>
DEVICE void multiply_unit(float (&sums)[TILES][4], const Activations<COLUMNS>& x, const u8* base,
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
        const int held = COLUMNS == 1 ? 0 : g;
        float total[TILES][4];
        UNROLL
        for (int tile = 0; tile < TILES; tile++) UNROLL
        for (int j = 0; j < 4; j++) total[tile][j] = x.start[tile][held][j];
        auto add = [&](const u32(&a)[4], int s) {
            UNROLL
            for (int tile = 0; tile < TILES; tile++)
                multiply_tile(total[tile], a, x.words[tile][held][2 * s], x.words[tile][held][2 * s + 1], total[tile]);
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
        if constexpr (COLUMNS == 1) {
            // Lanes that hold the columns of the first two groups hand on to those of the others.
            UNROLL
            for (int j = 0; j < 4; j += 2) {
                if (g == 2) sums[0][j] = shuffle_xor(sums[0][j], 1);
                sums[0][j] = fused_multiply_add(j < 2 ? upper : lower, total[0][j + (g & 1)], sums[0][j]);
            }
        } else {
            UNROLL
            for (int tile = 0; tile < TILES; tile++) UNROLL
            for (int j = 0; j < 4; j++)
                sums[tile][j] = fused_multiply_add(j < 2 ? upper : lower, total[tile][j], sums[tile][j]);
        }
    }
}

// A block's share of the work: tiles of the rows, units of the columns.
struct Share {
    int rank, begin, end, first_unit, units;

    DEVICE Share(const Matvec& call) {
        const int cluster = call.split == 1 ? block_index() : block_index() / call.split;
        rank = block_index() - cluster * call.split;
        begin = cluster * call.share + smaller(cluster, call.rest);
        end = begin + call.share + (cluster < call.rest);
        first_unit = rank * call.warps;
        units = smaller(call.warps, call.planes.units - first_unit);
    }
};

// How shared memory is divided: barriers, the share (kept there because registers are scarce), the ring of stages, sums
// of the warps for each stage or for two steps, results of tiles that other blocks of the cluster add to.
template <int EXTRA, int COLUMNS> struct Block {
    static constexpr int UNIT = UNIT_BASE + EXTRA * UNIT_BITS + UNIT_SCALE;
    static constexpr int PARTS = EXTRA + 2;   // the base, the planes, the scales
    static constexpr int SUMS = 16 * COLUMNS; // floats of a tile's results
    static constexpr int HELPERS = helpers_of(COLUMNS), TILES = COLUMNS > 8 ? 2 : 1;
    static constexpr int HELD = COLUMNS == 1 ? 1 : 4 * TILES; // of a tile's results by a lane

    // Of a stage: its bytes have come, all have read them.
    DEVICE static u64* come(int slot) { return (u64*)shared_memory() + slot; }
    DEVICE static u64* read(int slot) { return come(MOST_STAGES + slot); }
    DEVICE static Share& share() { return *(Share*)(shared_memory() + SHARE_BYTES); }
    DEVICE static float* partial(const Matvec& call, int buffer) {
        float* sums = (float*)(shared_memory() + HEAD_BYTES + call.stage_memory);
        return sums + buffer * call.tiles_per_stage * call.warps * SUMS;
    }
    DEVICE static float* results(const Matvec& call) { return partial(call, HELPERS ? call.stages[0] : 2); }

    DEVICE static int part_size(int index) { return index == 0 ? UNIT_BASE : index > EXTRA ? UNIT_SCALE : UNIT_BITS; }

    // Where the ring keeps a part of a tile's first unit; `place` counts tiles.
    DEVICE static u8* part(const Matvec& call, int place, int index) {
        int before = index == 0 ? 0 : UNIT_BASE + (index - 1) * UNIT_BITS;
        return shared_memory() + HEAD_BYTES + call.warps * (place * UNIT + before);
    }

    // One thread: one of the copies of the tiles from `first` on into a stage that nobody reads any more.
    DEVICE static void fetch(const Matvec& call, const Share& share, int first, int slot, int copy) {
        const int tile = copy / PARTS, index = copy % PARTS, size = part_size(index);
        const u8* from = index == 0      ? call.planes.base
                         : index > EXTRA ? call.planes.scale
                                         : call.planes.bits[index - 1];
        from += ((long long)(first + tile) * call.planes.units + share.first_unit) * size;
        u8* to = part(call, slot * call.tiles_per_stage + tile, index);
        copy_to_shared(to, from, share.units * size, come(slot));
    }

    // One of the warps that copy, the helpers or all: its share of a stage, since it waits for each of its copies to be
    // taken. The first says how many bytes are awaited, be it before the others' have come or after.
    DEVICE static void fetch_stage(const Matvec& call, const Share& share, int first, int slot, int warp) {
        const int lane = thread_index() & 31, warps = HELPERS ? HELPERS : call.warps;
        const int copies = share.units > 0 ? smaller(call.tiles_per_stage, share.end - first) * PARTS : 0;
        if (copies <= 0) return;
        if (lane == 0 && warp == 0) barrier_expect(come(slot), copies / PARTS * share.units * UNIT);
        if (lane == 0 && warp > 0 && HELPERS) barrier_arrive(come(slot));
        NO_UNROLL
        for (int copy = warp + warps * lane; copy < copies; copy += 32 * warps) fetch(call, share, first, slot, copy);
    }

    // One thread of each warp: what the others will find.
    DEVICE static void prepare(const Matvec& call, int warp) {
        const Share own(call);
        NO_UNROLL
        for (int slot = warp; slot < call.stages[EXTRA]; slot += call.warps + HELPERS) {
            barrier_init(come(slot), HELPERS ? HELPERS : 1);
            if (HELPERS) barrier_init(read(slot), own.units > 0 ? own.units : 1);
        }
        barriers_ready();
        if (warp == 0) share() = own;
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

    // One warp: adds up what the warps have of a tile.
    template <bool GATED>
    DEVICE static void sum_up(const Matvec& call, const Share& share, const float* partial, int tile) {
        const int lane = thread_index() & 31;
        if (!GATED && COLUMNS == 1 && lane >= 16) return;
        float sums[HELD];
        UNROLL
        for (int j = 0; j < HELD; j++) sums[j] = 0;
        partial += COLUMNS == 1 ? lane & 15 : 4 * lane;
        UNROLL_4
        for (int unit = 0; unit < share.units; unit++, partial += SUMS) {
            if constexpr (COLUMNS == 1) {
                sums[0] += load_shared(partial);
            } else {
                UNROLL
                for (int n = 0; n < TILES; n++) {
                    float4 part = load_shared((const float4*)partial + n * 32);
                    sums[4 * n] += part.x, sums[4 * n + 1] += part.y, sums[4 * n + 2] += part.z,
                        sums[4 * n + 3] += part.w;
                }
            }
        }
        if constexpr (GATED) {
            if (call.split == 1) store_gates(call, tile, lane, sums);
            if (call.split == 1 || (COLUMNS == 1 && lane >= 16)) return;
        }
        UNROLL
        for (int j = 0; j < HELD; j++)
            if (call.split == 1)
                store_results(call, tile, lane, j, sums[j]);
            else if constexpr (COLUMNS == 1)
                store_shared(results(call) + (tile - share.begin) * 16 + lane, sums[j]);
            else
                store_shared(results(call) + ((tile - share.begin) * HELD + j) * 32 + lane, sums[j]);
    }

    // The warps that copy and sum up; `asked` stages are on their way. A stage's bytes cannot have come before each of
    // them has asked, after it has summed up what was there: so sums are not overwritten.
    template <bool GATED> DEVICE static void help(const Matvec& call, const Share& share, int warp, int asked) {
        const int tiles = call.tiles_per_stage, stages = call.stages[EXTRA];
        int slot = 0, next = share.begin + asked * tiles, next_slot = asked == stages ? 0 : asked, awaited = 0;
        u32 phase = 0, awaited_phase = 0;
        for (int first = share.begin; first < share.end; first += tiles) {
            // So many on their way at a time, into stages that have been read and summed up.
            while (next < share.end && next < first + stages * tiles && next <= first + asked * tiles) {
                if (share.units > 0) barrier_wait(come(awaited), awaited_phase);
                fetch_stage(call, share, next, next_slot, warp);
                next += tiles;
                if (++next_slot == stages) next_slot = 0;
                if (++awaited == stages) awaited = 0, awaited_phase ^= 1;
            }
            if (share.units > 0) barrier_wait(read(slot), phase);
            for (int tile = 0; tile < smaller(tiles, share.end - first); tile++)
                if ((first + tile - share.begin) % HELPERS == warp)
                    sum_up<GATED>(call, share, partial(call, slot) + tile * call.warps * SUMS, first + tile);
            synchronize_warp();
            if (++slot == stages) slot = 0, phase ^= 1;
        }
    }
};

template <int EXTRA, int COLUMNS, bool GATED = false> DEVICE void matvec(const Matvec& call) {
    using Block = Block<EXTRA, COLUMNS>;
    constexpr int HELD = Block::HELD;
    const int warps = call.warps, all = warps + Block::HELPERS, tiles_per_stage = call.tiles_per_stage;
    const int stages = call.stages[EXTRA], asked = Block::HELPERS && stages > 1 ? stages / 2 + 1 : stages;
    const int warp = thread_index() >> 5, lane = thread_index() & 31;
    const Share& share = Block::share();
    if (lane == 0) Block::prepare(call, warp);
    synchronize_block();
    const int copier = Block::HELPERS ? warp - warps : warp;
    if (copier >= 0) {
        NO_UNROLL
        for (int slot = 0; slot < asked; slot++)
            Block::fetch_stage(call, share, share.begin + slot * tiles_per_stage, slot, copier);
    }
    start_next_kernel();
    await_previous_kernel();
    Activations<COLUMNS> x;
    if (warp < share.units) load_activations<EXTRA>(x, call, share.first_unit + warp);

    auto multiply = [&](int slot, int count, float* partial) {
        NO_UNROLL
        for (int tile = 0; tile < count; tile++) {
            const int held = slot * tiles_per_stage + tile, unit = tile * warps + warp;
            const u8* bits[EXTRA + 1];
            UNROLL
            for (int b = 0; b < EXTRA; b++) bits[b] = Block::part(call, held, b + 1) + warp * UNIT_BITS;
            float sums[Block::TILES][4];
            multiply_unit<EXTRA>(sums, x, Block::part(call, held, 0) + warp * UNIT_BASE, bits,
                                 Block::part(call, held, EXTRA + 1) + warp * UNIT_SCALE);
            UNROLL
            for (int n = 0; n < Block::TILES; n++) {
                float4 scaled = {sums[n][0] * x.factor[n][0], sums[n][1] * x.factor[n][1], sums[n][2] * x.factor[n][0],
                                 sums[n][3] * x.factor[n][1]};
                if constexpr (COLUMNS > 1) {
                    store_shared((float4*)(partial + unit * Block::SUMS) + n * 32 + lane, scaled);
                } else if ((lane & 3) == 1) {
                    store_shared(partial + unit * 16 + (lane >> 2), scaled.x);
                    store_shared(partial + unit * 16 + (lane >> 2) + 8, scaled.z);
                }
            }
        }
    };
    int slot = 0;
    u32 phase = 0;
    if (Block::HELPERS && warp >= warps) {
        if constexpr (Block::HELPERS) Block::template help<GATED>(call, share, copier, asked);
    } else {
        for (int first = share.begin, step = 0; first < share.end; first += tiles_per_stage, step++) {
            const int count = smaller(tiles_per_stage, share.end - first);
            float* partial = Block::partial(call, Block::HELPERS ? slot : step & 1);
            if (warp < share.units) {
                barrier_wait(Block::come(slot), phase);
                multiply(slot, count, partial);
            }
            if constexpr (Block::HELPERS) {
                synchronize_warp();
                if (lane == 0 && warp < share.units) barrier_arrive(Block::read(slot));
            } else {
                synchronize_block();
                Block::fetch_stage(call, share, first + stages * tiles_per_stage, slot, warp);
                // Each tile is summed up by one warp, the last, which copies least, while others begin with the next.
                for (int tile = warps - 1 - warp; tile < count; tile += warps)
                    Block::template sum_up<GATED>(call, share, partial + tile * warps * Block::SUMS, first + tile);
            }
            if (++slot == stages) slot = 0, phase ^= 1;
        }
    }
    if (call.split == 1) return;

    synchronize_cluster();
    if constexpr (GATED) {
        for (int tile = share.rank * all + warp; tile < share.end - share.begin; tile += call.split * all) {
            float sums[HELD];
            UNROLL
            for (int j = 0; j < HELD; j++) {
                int place = COLUMNS == 1 ? tile * 16 + (lane & 15) : (tile * HELD + j) * 32 + lane;
                sums[j] = 0;
                for (int rank = 0; rank < call.split; rank++)
                    sums[j] += load_cluster(Block::results(call) + place, rank);
            }
            Block::store_gates(call, share.begin + tile, lane, sums);
        }
        synchronize_cluster();
        return;
    }
    for (int tile = share.rank * all + warp; tile < share.end - share.begin; tile += call.split * all)
        if (COLUMNS > 1 || lane < 16) UNROLL
    for (int j = 0; j < HELD; j++) {
        const float* from = Block::results(call) + (COLUMNS == 1 ? tile * 16 : (tile * HELD + j) * 32) + lane;
        float sum = 0;
        for (int rank = 0; rank < call.split; rank++) sum += load_cluster(from, rank);
        Block::store_results(call, share.begin + tile, lane, j, sum);
    }
    synchronize_cluster();
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
    matvec<OTARO_EXTRA, OTARO_COLUMNS, OTARO_GATED>(call);
#    else
    matvec_any<OTARO_COLUMNS>(call);
#    endif
}
#endif
