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

constexpr int MOST_STAGES = 16, BARRIER_BYTES = 128, HEAD_BYTES = 256;

struct Matvec {
    Planes planes;
    const u16 *x, *bias; // [batch, columns], [rows] or none
    u16* y;              // [batch, rows]
    const int* mantissa; // in device memory, for the form that reads its width there
    int batch, bfloat, stored;
    int split, warps, tiles_per_stage, stage_memory; // blocks of a cluster; warps, tiles and bytes of a block
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
template <int TILES> struct Activations {
    u32 words[TILES][4][8];
    float start[TILES][4][4]; // what the accumulators of a group begin with
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

template <int EXTRA, int TILES> DEVICE void load_activations(Activations<TILES>& x, const Matvec& call, int unit) {
    int lane = thread_index() & 31, own = lane & 3;
    UNROLL
    for (int tile = 0; tile < TILES; tile++) {
        if ((call.planes.columns & 3) == 0)
            load_unit<true>(x.words[tile], call, 8 * tile + (lane >> 2), 256 * unit + 4 * own);
        else
            load_unit<false>(x.words[tile], call, 8 * tile + (lane >> 2), 256 * unit + 4 * own);
        float factor = call.bfloat ? scale_bfloats(x.words[tile]) : 1.0f;
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
            for (int j = 0; j < 4; j++) x.start[tile][g][j] = shuffle(sum, 4 * (2 * own + (j & 1)));
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
        for (int j = 0; j < 4; j++) total[tile][j] = x.start[tile][g][j];
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

// A block's share of the work: tiles of the rows, units of the columns, stages of its ring.
struct Share {
    int rank, begin, end, first_unit, units, stages;
};

// How shared memory is divided: barriers, the share (kept there because registers are scarce), the ring of stages, sums
// of the warps for two steps, results of tiles that other blocks of the cluster add to.
template <int EXTRA, int COLUMNS> struct Block {
    static constexpr int UNIT = UNIT_BASE + EXTRA * UNIT_BITS + UNIT_SCALE;
    static constexpr int PARTS = EXTRA + 2;   // the base, the planes, the scales
    static constexpr int SUMS = 16 * COLUMNS; // floats of a tile's results

    DEVICE static u64* barrier(int slot) { return (u64*)shared_memory() + slot; }
    DEVICE static Share& share() { return *(Share*)(shared_memory() + BARRIER_BYTES); }
    DEVICE static float* partial(const Matvec& call, int step) {
        float* sums = (float*)(shared_memory() + HEAD_BYTES + call.stage_memory);
        return sums + (step & 1) * call.tiles_per_stage * call.warps * SUMS;
    }
    DEVICE static float* results(const Matvec& call) {
        return partial(call, 0) + 2 * (partial(call, 1) - partial(call, 0));
    }

    // One thread: what the others will find.
    DEVICE static void prepare(const Matvec& call) {
        int rank = block_index() % call.split;
        int cluster = block_index() / call.split, units = smaller(call.warps, call.planes.units - rank * call.warps);
        Share own;
        own.rank = rank;
        own.begin = cluster * call.share + smaller(cluster, call.rest);
        own.end = own.begin + call.share + (cluster < call.rest);
        own.first_unit = rank * call.warps;
        own.units = units < 0 ? 0 : units;
        own.stages = smaller(MOST_STAGES, call.stage_memory / (call.tiles_per_stage * call.warps * UNIT));
        share() = own;
        NO_UNROLL
        for (int slot = 0; slot < own.stages; slot++) barrier_init(barrier(slot), call.warps);
        barriers_ready();
    }

    DEVICE static int part_size(int index) { return index == 0 ? UNIT_BASE : index > EXTRA ? UNIT_SCALE : UNIT_BITS; }

    // Where a stage keeps a part of its first unit.
    DEVICE static u8* part(const Matvec& call, int slot, int index) {
        int before = index == 0 ? 0 : UNIT_BASE + (index - 1) * UNIT_BITS;
        return shared_memory() + HEAD_BYTES + call.tiles_per_stage * call.warps * (slot * UNIT + before);
    }

    // One thread of each warp: copies its share of a step's tiles into a stage that nobody reads any more.
    DEVICE static void fetch(const Matvec& call, int step, int slot, int warp) {
        int first = share().begin + step * call.tiles_per_stage, units = share().units;
        int count = smaller(call.tiles_per_stage, share().end - first), bytes = 0;
        if (count <= 0 || units == 0) return;
        NO_UNROLL
        for (int copy = warp; copy < count * PARTS; copy += call.warps) bytes += units * part_size(copy % PARTS);
        barrier_expect(barrier(slot), bytes);
        NO_UNROLL
        for (int copy = warp; copy < count * PARTS; copy += call.warps) {
            int tile = copy / PARTS, index = copy % PARTS, size = part_size(index);
            const u8* from = index == 0      ? call.planes.base
                             : index > EXTRA ? call.planes.scale
                                             : call.planes.bits[index - 1];
            from += ((long long)(first + tile) * call.planes.units + share().first_unit) * size;
            copy_to_shared(part(call, slot, index) + tile * call.warps * size, from, units * size, barrier(slot));
        }
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

template <int EXTRA, int COLUMNS, bool GATED = false> DEVICE void matvec(const Matvec& call) {
    constexpr int TILES = COLUMNS > 8 ? 2 : 1, HELD = COLUMNS == 1 ? 1 : 4 * TILES;
    using Block = Block<EXTRA, COLUMNS>;
    const int warp = thread_index() >> 5, lane = thread_index() & 31, tiles_per_stage = call.tiles_per_stage;
    const Share& share = Block::share();
    if (thread_index() == 0) Block::prepare(call);
    synchronize_block();
    if (lane == 0) {
        NO_UNROLL
        for (int step = 0; step < share.stages; step++) Block::fetch(call, step, step, warp);
    }
    start_next_kernel();
    await_previous_kernel();
    Activations<TILES> x;
    if (warp < share.units) load_activations<EXTRA>(x, call, share.first_unit + warp);

    int slot = 0, step = 0;
    u32 phase = 0;
    for (int first = share.begin; first < share.end; first += tiles_per_stage, step++) {
        int count = smaller(tiles_per_stage, share.end - first);
        float* partial = Block::partial(call, step);
        if (warp < share.units) {
            barrier_wait(Block::barrier(slot), phase);
            NO_UNROLL
            for (int tile = 0; tile < count; tile++) {
                int unit = tile * call.warps + warp;
                const u8* bits[EXTRA + 1];
                UNROLL
                for (int b = 0; b < EXTRA; b++) bits[b] = Block::part(call, slot, b + 1) + unit * UNIT_BITS;
                float sums[TILES][4];
                multiply_unit<EXTRA>(sums, x, Block::part(call, slot, 0) + unit * UNIT_BASE, bits,
                                     Block::part(call, slot, EXTRA + 1) + unit * UNIT_SCALE);
                UNROLL
                for (int n = 0; n < TILES; n++) {
                    float4 scaled = {sums[n][0] * x.factor[n][0], sums[n][1] * x.factor[n][1],
                                     sums[n][2] * x.factor[n][0], sums[n][3] * x.factor[n][1]};
                    if constexpr (COLUMNS > 1) {
                        store_shared((float4*)(partial + unit * Block::SUMS) + n * 32 + lane, scaled);
                    } else if ((lane & 3) == 0) {
                        store_shared(partial + unit * 16 + (lane >> 2), scaled.x);
                        store_shared(partial + unit * 16 + (lane >> 2) + 8, scaled.z);
                    }
                }
            }
        }
        synchronize_block();
        if (lane == 0) Block::fetch(call, step + share.stages, slot, warp);
        // Each tile is summed up by one warp, while the others begin with the next.
        for (int tile = warp; tile < count; tile += call.warps) {
            if (!GATED && COLUMNS == 1 && lane >= 16) continue;
            float sums[HELD];
            UNROLL
            for (int j = 0; j < HELD; j++) sums[j] = 0;
            for (int unit = tile * call.warps; unit < tile * call.warps + share.units; unit++) {
                if constexpr (COLUMNS == 1) {
                    sums[0] += load_shared(partial + unit * 16 + (lane & 15));
                } else {
                    UNROLL
                    for (int n = 0; n < TILES; n++) {
                        float4 part = load_shared((const float4*)(partial + unit * Block::SUMS) + n * 32 + lane);
                        sums[4 * n] += part.x, sums[4 * n + 1] += part.y, sums[4 * n + 2] += part.z,
                            sums[4 * n + 3] += part.w;
                    }
                }
            }
            if constexpr (GATED) {
                if (call.split == 1) Block::store_gates(call, first + tile, lane, sums);
                if (call.split == 1 || (COLUMNS == 1 && lane >= 16)) continue;
            }
            UNROLL
            for (int j = 0; j < HELD; j++)
                if (call.split == 1)
                    Block::store_results(call, first + tile, lane, j, sums[j]);
                else if constexpr (COLUMNS == 1)
                    store_shared(Block::results(call) + (first - share.begin + tile) * 16 + lane, sums[j]);
                else
                    store_shared(Block::results(call) + ((first - share.begin + tile) * HELD + j) * 32 + lane, sums[j]);
        }
        if (++slot == share.stages) slot = 0, phase ^= 1;
    }
    if (call.split == 1) return;

    synchronize_cluster();
    if constexpr (GATED) {
        for (int tile = share.rank * call.warps + warp; tile < share.end - share.begin;
             tile += call.split * call.warps) {
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
    for (int tile = share.rank * call.warps + warp; tile < share.end - share.begin; tile += call.split * call.warps)
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
