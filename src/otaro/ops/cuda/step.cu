// A whole step of decoding, all layers and the head, in one launch: 1 … 16 tokens of any texts.
//
// One block stays on every multiprocessor. Its last warp does nothing but copy weights: it walks through all matrices in the
// order in which the other warps multiply them, as far ahead as the ring of slots in shared memory allows, so memory
// goes on delivering while the blocks wait for each other, look at keys and values, or are slow to begin. The other warps
// take phases in turn, after each of which all blocks meet:
//
//     query, key, value      of the normed residual stream
//     attention              rotation first, the new key and value into the cache; then a stretch of 128 keys of a text
//                            and a key head at a time; the block that is done last puts stretches together
//     output                 added to the residual stream
//     gate, up               of the normed residual stream; silu(gate) · up
//     down                   added to the residual stream
//
// and the head in the end. A block has its own range of tiles of 16 rows of each matrix and all columns, eight units of
// which fill a slot. Warps stand side by side, 256 columns each, in several passes where there are more columns; what
// they add up for a tile goes through shared memory in a fixed order, so equal calls give equal bits, and a token's
// numbers depend on nothing that is beside it.

constexpr int SLOT_UNITS = 8, MOST_SLOTS = 16, STRETCH = 128, MOST_BATCH = 16, QUERIES = 4, MOST_DIMENSION = 256;
constexpr int SUMS_BYTES = 32768, STEP_HEAD = 2048, STAGE_BYTES = 8192;
constexpr int COPIERS = 4, COPIER_REGISTERS = 24; // warps: registers are given and taken by four at a time
enum { QKV, OUTPUT, GATE_UP, DOWN, LAYER_MATRICES };

struct Size {
    int rows, columns, units;
};

struct Step {
    const Planes* planes; // [layers][LAYER_MATRICES]
    Planes head;
    const u16* bias[LAYER_MATRICES];               // [layers][rows] each, or none
    const float *norms, *final_norm;               // [layers][2][hidden]: attention, feed forward
    const float *query_norms, *key_norms;          // [layers][dimension], or none
    const float* frequency;                        // [dimension / 2]
    const int* windows;                            // [layers], 0 for none
    const long long *positions, *addresses, *room; // of each row; its text's cache, and tokens that it has room for
    float *x, *qkv;                                // [batch][hidden], [batch][rows]
    float *partial, *extremes;                     // [batch][heads][stretches][dimension], […][2]
    u16 *mixed, *inner, *logits;                   // [batch][heads · dimension], [batch][intermediate], [batch][rows]
    u32* counters;                                 // zeros: meetings, blocks that are done, then [batch][key heads]
    Size size[LAYER_MATRICES];
    int layers, batch, bfloat, hidden, intermediate, heads, kv_heads, dimension, key_row, value_row, stretches, slots;
    float epsilon, rope_factor;
};

// Where a block is in the ring.
struct Place {
    int slot;
    u32 phase;
};

template <int EXTRA, int HEAD_EXTRA, int COLUMNS> struct Whole {
    static constexpr int TILES = COLUMNS > 8 ? 2 : 1, WARPS = COLUMNS > 8 ? 8 : 16, HELD = COLUMNS == 1 ? 1 : 4 * TILES;
    static constexpr int THREADS = 32 * WARPS, SUMS = 16 * COLUMNS; // floats of a tile's results
    static constexpr int CAPACITY = SUMS_BYTES / 8 / WARPS / SUMS;  // tiles whose sums are held at a time
    // A quarter of the warps share 512 registers a lane, of which a launch takes as many as all warps can have alike.
    static constexpr int QUARTER = WARPS / 4, LAUNCHED = 512 / (QUARTER + 1) / 8 * 8;
    static constexpr int REGISTERS = (LAUNCHED * (QUARTER + 1) - COPIER_REGISTERS) / QUARTER / 8 * 8;
    static constexpr int WIDEST = EXTRA > HEAD_EXTRA ? EXTRA : HEAD_EXTRA;
    static constexpr int SLOT = SLOT_UNITS * (UNIT_BASE + WIDEST * UNIT_BITS + UNIT_SCALE);

    const Step& step;
    Place place = {0, 0};
    u32 met = 0;
    int flushed = 0;

    // Shared memory: barriers, what a block finds out once, a stage for numbers on their way from one lane to another,
    // sums of the warps (two sets), cosines and sines of each row's position, the ring.
    struct Shared {
        u64 full[MOST_SLOTS], empty[MOST_SLOTS];
        long long position[MOST_BATCH], address[MOST_BATCH], room[MOST_BATCH];
        union {
            float squares[WARPS][MOST_BATCH];
            float extremes[2][QUERIES][WARPS]; // of the scores of some queries: the largest, the sum of the odds
        };
        int last;
    };
    static_assert(sizeof(Shared) <= STEP_HEAD, "");
    DEVICE static Shared& shared() { return *(Shared*)shared_memory(); }
    DEVICE static u8* stage() { return shared_memory() + STEP_HEAD; }
    DEVICE static float* sums() { return (float*)(shared_memory() + STEP_HEAD + STAGE_BYTES); }
    DEVICE static float* angles() { return (float*)(shared_memory() + STEP_HEAD + STAGE_BYTES + SUMS_BYTES); }
    DEVICE u8* slot(int number) const {
        const int table = (step.batch * step.dimension * (int)sizeof(float) + 127) / 128 * 128;
        return (u8*)angles() + table + number * SLOT;
    }

    DEVICE static void meet() { synchronize_threads(THREADS); }
    DEVICE void next() {
        if (++place.slot == step.slots) place.slot = 0, place.phase ^= 1;
    }

    // The tiles of a matrix that are a block's own.
    DEVICE static int share(int rows, int& begin) {
        const int tiles = (rows + 15) / 16, blocks = grid_blocks(), block = block_index();
        begin = block * (tiles / blocks) + smaller(block, tiles % blocks);
        return tiles / blocks + (block < tiles % blocks);
    }
    // Units that the warps take at a time: side by side, or where there are few in two sets, a tile each.
    DEVICE static bool wide(int units) { return WARPS > SLOT_UNITS && units > SLOT_UNITS; }

    // ---- the warp that copies ---------------------------------------------------------------------------------------

    template <int BITS> DEVICE void copy_matrix(const Planes& planes, int rows, int units) {
        int begin, count = share(rows, begin);
        const bool both = wide(units);
        const int across = both ? 2 * SLOT_UNITS : SLOT_UNITS;
        NO_UNROLL
        for (int group = 0; group < count; group += CAPACITY) {
            const int tiles = smaller(CAPACITY, count - group);
            NO_UNROLL
            for (int pass = 0; pass < units; pass += across) NO_UNROLL
            for (int tile = begin + group; tile < begin + group + tiles; tile++) NO_UNROLL
            for (int first = pass; first < smaller(units, pass + across); first += SLOT_UNITS) {
                const int own = smaller(SLOT_UNITS, units - first);
                barrier_wait(&shared().empty[place.slot], place.phase ^ 1);
                u64* full = &shared().full[place.slot];
                barrier_expect(full, own * (UNIT_BASE + BITS * UNIT_BITS + UNIT_SCALE));
                u8* to = slot(place.slot);
                const long long unit = (long long)tile * units + first;
                copy_to_shared(to, planes.base + unit * UNIT_BASE, own * UNIT_BASE, full);
                to += SLOT_UNITS * UNIT_BASE;
                UNROLL
                for (int b = 0; b < BITS; b++, to += SLOT_UNITS * UNIT_BITS)
                    copy_to_shared(to, planes.bits[b] + unit * UNIT_BITS, own * UNIT_BITS, full);
                copy_to_shared(to, planes.scale + unit * UNIT_SCALE, own * UNIT_SCALE, full);
                next();
            }
        }
    }
    DEVICE void copy_all() {
        NO_UNROLL
        for (int matrix = 0; matrix < step.layers * LAYER_MATRICES; matrix++) {
            const Size size = step.size[matrix % LAYER_MATRICES];
            if (matrix % LAYER_MATRICES == QKV) expect(matrix / LAYER_MATRICES);
            const Planes planes = step.planes[matrix];
            copy_matrix<EXTRA>(planes, size.rows, size.units);
        }
        copy_matrix<HEAD_EXTRA>(step.head, step.head.rows, step.head.units);
    }

    // ---- the warps that multiply ------------------------------------------------------------------------------------

    DEVICE static int warp() { return thread_index() >> 5; }
    DEVICE static int lane() { return thread_index() & 31; }

    // A matrix times x, which `load(x, unit)` brings; `begun` are called when the first of x is there. Every result goes
    // to store(row, column, value), or of a tile of gates and what they let through to store(row, column, gate, up).
    // What is added to a result, before(row, column), is on its way while the products are made.
    template <int BITS, bool GATED, class Load, class Begun, class Before, class Store>
    DEVICE void multiply(int rows, int units, Load load, Begun begun, Before before, Store store) {
        int begin, count = share(rows, begin);
        if (count == 0) return;
        const bool both = wide(units);
        const int across = both ? 2 * SLOT_UNITS : SLOT_UNITS, half = warp() / SLOT_UNITS;
        const int own = both ? warp() : warp() % SLOT_UNITS, used = smaller(across, units);
        Activations<TILES> x;
        load(x, own);
        begun(x);
        NO_UNROLL
        for (int group = 0; group < count; group += CAPACITY) {
            const int tiles = smaller(CAPACITY, count - group);
            float* const partial = sums() + (flushed & 1) * (SUMS_BYTES / 8);
            NO_UNROLL
            for (int pass = 0; pass < units; pass += across) {
                if (units > across && (group > 0 || pass > 0)) {
                    load(x, pass + own);
                    begun(x);
                }
                NO_UNROLL
                for (int tile = 0; tile < tiles; tile++) NO_UNROLL
                for (int first = pass; first < smaller(units, pass + across); first += SLOT_UNITS) {
                    // A slot is emptied by as many warps as it has units; it is not filled again before they have come.
                    if (both ? (first - pass) / SLOT_UNITS == half : tile % (WARPS / SLOT_UNITS) == half) {
                        barrier_wait(&shared().full[place.slot], place.phase);
                        if (pass + own < units)
                            add_unit<BITS>(x, slot(place.slot), partial + (tile * WARPS + warp()) * SUMS, pass > 0);
                        synchronize_warp();
                        if (lane() == 0) barrier_arrive(&shared().empty[place.slot]);
                    }
                    next();
                }
            }
            float total[HELD];
            start_tile(begin + group + warp(), warp() < tiles, total, before);
            meet();
            // Each tile is summed up by one warp, while the others begin with the next.
            NO_UNROLL
            for (int tile = warp(); tile < tiles; tile += WARPS) {
                if (tile != warp()) start_tile(begin + group + tile, true, total, before);
                const float* const from =
                    partial + (tile * WARPS + (both ? 0 : (tile % (WARPS / SLOT_UNITS)) * SLOT_UNITS)) * SUMS;
                add_parts(from, used, total);
                if (used > SLOT_UNITS) add_parts(from + SLOT_UNITS * SUMS, used - SLOT_UNITS, total);
                store_tile<GATED>(begin + group + tile, total, store);
            }
            flushed++;
        }
    }

    // What up to eight warps have of a tile.
    DEVICE static void add_parts(const float* from, int used, float (&total)[HELD]) {
        UNROLL
        for (int part = 0; part < SLOT_UNITS; part++, from += SUMS) {
            const bool there = part < used;
            if constexpr (COLUMNS == 1) {
                const float one = load_shared(from + (lane() & 15));
                total[0] += there ? one : 0.0f;
            } else {
                UNROLL
                for (int n = 0; n < TILES; n++) {
                    const float4 four = load_shared((const float4*)from + n * 32 + lane());
                    total[4 * n] += there ? four.x : 0.0f, total[4 * n + 1] += there ? four.y : 0.0f;
                    total[4 * n + 2] += there ? four.z : 0.0f, total[4 * n + 3] += there ? four.w : 0.0f;
                }
            }
        }
    }

    template <int BITS> DEVICE static void add_unit(const Activations<TILES>& x, const u8* from, float* to, bool more) {
        const int unit = warp() % SLOT_UNITS;
        const u8* bits[BITS + 1];
        UNROLL
        for (int b = 0; b < BITS; b++) bits[b] = from + SLOT_UNITS * (UNIT_BASE + b * UNIT_BITS) + unit * UNIT_BITS;
        float sums[TILES][4];
        multiply_unit<BITS>(sums, x, from + unit * UNIT_BASE, bits,
                            from + SLOT_UNITS * (UNIT_BASE + BITS * UNIT_BITS) + unit * UNIT_SCALE);
        UNROLL
        for (int n = 0; n < TILES; n++) {
            float4 scaled = {sums[n][0] * x.factor[n][0], sums[n][1] * x.factor[n][1], sums[n][2] * x.factor[n][0],
                             sums[n][3] * x.factor[n][1]};
            if constexpr (COLUMNS > 1) {
                float4* const place = (float4*)to + n * 32 + lane();
                if (more) {
                    float4 before = load_shared((const float4*)place);
                    scaled.x += before.x, scaled.y += before.y, scaled.z += before.z, scaled.w += before.w;
                }
                store_shared(place, scaled);
            } else if ((lane() & 3) == 0) {
                float* const place = to + (lane() >> 2);
                store_shared(place, more ? load_shared((const float*)place) + scaled.x : scaled.x);
                store_shared(place + 8, more ? load_shared((const float*)place + 8) + scaled.z : scaled.z);
            }
        }
    }

    // What is added to the results of a tile, in the order in which a lane holds them.
    template <class Before> DEVICE void start_tile(int tile, bool there, float (&total)[HELD], Before before) {
        UNROLL
        for (int j = 0; j < HELD; j++) {
            const int row = COLUMNS == 1 ? lane() & 15 : (lane() >> 2) + 4 * (j & 2);
            const int column = COLUMNS == 1 ? 0 : 8 * (j >> 2) + 2 * (lane() & 3) + (j & 1);
            total[j] = there ? before(16 * tile + row, column) : 0.0f;
        }
    }

    template <bool GATED, class Store> DEVICE void store_tile(int tile, const float (&total)[HELD], Store store) {
        if constexpr (GATED && COLUMNS == 1) {
            float up = shuffle_xor(total[0], 8);
            if (lane() < 8) store(8 * tile + lane(), 0, total[0], up);
        } else if constexpr (GATED) {
            UNROLL
            for (int j = 0; j < HELD; j++)
                if ((j & 2) == 0)
                    store(8 * tile + (lane() >> 2), 8 * (j >> 2) + 2 * (lane() & 3) + (j & 1), total[j], total[j | 2]);
        } else if constexpr (COLUMNS == 1) {
            if (lane() < 16) store(16 * tile + lane(), 0, total[0]);
        } else {
            UNROLL
            for (int j = 0; j < HELD; j++)
                store(16 * tile + (lane() >> 2) + 4 * (j & 2), 8 * (j >> 2) + 2 * (lane() & 3) + (j & 1), total[j]);
        }
    }

    // ---- what is multiplied -----------------------------------------------------------------------------------------

    // Lanes bring eight neighbouring columns of a row each, and take what the tensor cores want of them.
    DEVICE void deal(Activations<TILES>& x, int tile, int row, const uint4& words) {
        const uint2* const own = (const uint2*)(stage() + 512 * warp());
        store_shared((uint4*)own + lane(), words);
        synchronize_warp();
        if ((lane() >> 2) == row) UNROLL
        for (int g = 0; g < 4; g++) UNROLL
        for (int s = 0; s < 4; s++) {
            uint2 two = load_shared(own + 16 * g + 4 * s + (lane() & 3));
            x.words[tile][g][2 * s] = two.x, x.words[tile][g][2 * s + 1] = two.y;
        }
        synchronize_warp();
    }
    DEVICE static float largest_of_warp(float value) {
        UNROLL
        for (int mask = 16; mask > 0; mask >>= 1) value = larger(value, shuffle_xor(value, mask));
        return value;
    }
    DEVICE static float sum_of_warp(float value) {
        UNROLL
        for (int mask = 16; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
        return value;
    }

    // A unit of all rows: `bring(row)` begins to load a lane's eight columns, `make(row, them, scaled)` says what they are
    // as half floats and returns what these are too small by.
    template <int BITS, class Loaded, class Bring, class Make>
    DEVICE void load_rows(Activations<TILES>& x, Bring bring, Make make) {
        constexpr int ROWS = COLUMNS == 1 ? 1 : 4; // that are on their way together
        UNROLL
        for (int tile = 0; tile < TILES; tile++) {
            float factor = 1;
            UNROLL
            for (int g = 0; g < 4; g++) UNROLL
            for (int j = 0; j < 8; j++) x.words[tile][g][j] = 0;
            NO_UNROLL
            for (int first = 0; first < 8 && 8 * tile + first < step.batch; first += ROWS) {
                Loaded loaded[ROWS];
                UNROLL
                for (int i = 0; i < ROWS; i++) loaded[i] = bring(smaller(8 * tile + first + i, step.batch - 1));
                UNROLL
                for (int i = 0; i < ROWS; i++) {
                    if (8 * tile + first + i >= step.batch) break;
                    uint4 words;
                    const float own = make(8 * tile + first + i, loaded[i], words);
                    if ((lane() >> 2) == first + i) factor = own;
                    deal(x, tile, first + i, words);
                }
            }
            prepare_activations<BITS>(x, tile, factor);
        }
    }

    struct Eight {
        float4 low, high;
    };
    DEVICE Eight eight_of(const float* from, int column, bool constant) const {
        Eight value;
        const int low = column < step.hidden ? column : 0, high = column + 4 < step.hidden ? column + 4 : 0;
        value.low = constant ? load_global((const float4*)(from + low)) : load_fresh((const float4*)(from + low));
        value.high = constant ? load_global((const float4*)(from + high)) : load_fresh((const float4*)(from + high));
        if (column >= step.hidden) value.low = {0, 0, 0, 0};
        if (column + 4 >= step.hidden) value.high = {0, 0, 0, 0};
        return value;
    }
    DEVICE static float squares_of(const Eight& v) {
        return sum_of_warp(v.low.x * v.low.x + v.low.y * v.low.y + v.low.z * v.low.z + v.low.w * v.low.w +
                           v.high.x * v.high.x + v.high.y * v.high.y + v.high.z * v.high.z + v.high.w * v.high.w);
    }

    // The residual stream times the weights of its norm, as half floats times a power of two for each row and unit; what
    // its norm divides by comes as a factor of the results. Squares of a row are noted the `first` time.
    template <int BITS> DEVICE void load_normed(Activations<TILES>& x, const float* weight, int unit, bool first) {
        const int column = 256 * unit + 8 * lane();
        const Eight w = eight_of(weight, column, true);
        load_rows<BITS, Eight>(
            x, [&](int row) { return eight_of(step.x + row * step.hidden, column, false); },
            [&](int row, Eight& v, uint4& words) {
                if (first) {
                    const float squares = squares_of(v);
                    if (lane() == 0) store_shared(&shared().squares[warp()][row], squares);
                }
                v.low = {v.low.x * w.low.x, v.low.y * w.low.y, v.low.z * w.low.z, v.low.w * w.low.w};
                v.high = {v.high.x * w.high.x, v.high.y * w.high.y, v.high.z * w.high.z, v.high.w * w.high.w};
                float largest =
                    larger(larger(size_of(v.low.x), size_of(v.low.y)), larger(size_of(v.low.z), size_of(v.low.w)));
                largest = larger(largest, larger(larger(size_of(v.high.x), size_of(v.high.y)),
                                                 larger(size_of(v.high.z), size_of(v.high.w))));
                const int field = half_field(largest_of_warp(largest));
                const float scale = float_of_bits((u32)field << 23);
                words.x = halves_of_floats(v.low.x * scale, v.low.y * scale);
                words.y = halves_of_floats(v.low.z * scale, v.low.w * scale);
                words.z = halves_of_floats(v.high.x * scale, v.high.y * scale);
                words.w = halves_of_floats(v.high.z * scale, v.high.w * scale);
                return float_of_bits((u32)(254 - field) << 23);
            });
    }

    // What the norm of each of the lane's columns multiplies by, once all warps have noted their squares.
    DEVICE void share_squares(int units, float (&factor)[TILES][2]) {
        NO_UNROLL
        for (int unit = warp() + WARPS; unit < units; unit += WARPS) NO_UNROLL
        for (int row = 0; row < step.batch; row++) {
            const float more = squares_of(eight_of(step.x + row * step.hidden, 256 * unit + 8 * lane(), false));
            float* const own = &shared().squares[warp()][row];
            if (lane() == 0) store_shared(own, load_shared(own) + more);
        }
        meet();
        // Where tiles are divided between two sets of warps, the second has the units of the first again.
        const int count = wide(units) ? WARPS : SLOT_UNITS;
        UNROLL
        for (int tile = 0; tile < TILES; tile++) UNROLL
        for (int j = 0; j < 2; j++) {
            const int column = 8 * tile + 2 * (lane() & 3) + j;
            float sum = 0;
            UNROLL
            for (int w = 0; w < WARPS; w++) {
                const float part = load_shared(&shared().squares[w][column]);
                sum += w < count && column < step.batch ? part : 0.0f;
            }
            factor[tile][j] = inverse_root(sum / step.hidden + step.epsilon);
        }
    }

    template <int BITS, bool GATED, class Store>
    DEVICE void multiply_normed(const float* weight, int rows, int units, Store store) {
        float factor[TILES][2];
        bool first = true;
        multiply<BITS, GATED>(
            rows, units, [&](Activations<TILES>& x, int unit) { load_normed<BITS>(x, weight, unit, first); },
            [&](Activations<TILES>& x) {
                if (first) share_squares(units, factor);
                first = false;
                UNROLL
                for (int tile = 0; tile < TILES; tile++) UNROLL
                for (int j = 0; j < 2; j++) x.factor[tile][j] *= factor[tile][j];
            },
            [](int, int) { return 0.0f; }, store);
    }
    // Rows of half floats or bfloat16, added to the residual stream.
    template <int BITS> DEVICE void multiply_plain(const u16* from, int layer, int matrix) {
        const int columns = step.size[matrix].columns;
        multiply<BITS, false>(
            step.size[matrix].rows, step.size[matrix].units,
            [&](Activations<TILES>& x, int unit) {
                const int column = 256 * unit + 8 * lane();
                load_rows<BITS, uint4>(
                    x,
                    [&](int row) {
                        uint4 value =
                            load_fresh((const uint4*)(from + row * columns + (column < columns ? column : 0)));
                        if (column >= columns) value = {0, 0, 0, 0};
                        return value;
                    },
                    [&](int, const uint4& value, uint4& words) {
                        words = value;
                        return step.bfloat ? halve_bfloats(words) : 1.0f;
                    });
            },
            [](Activations<TILES>&) {},
            [&](int row, int column) {
                if (row >= step.hidden || column >= step.batch) return 0.0f;
                return load_fresh((const float*)(step.x + column * step.hidden + row)) + bias_of(layer, matrix, row);
            },
            [&](int row, int column, float value) {
                if (row < step.hidden && column < step.batch) store_global(step.x + column * step.hidden + row, value);
            });
    }
    // As `scale_bfloats` has it.
    DEVICE static float halve_bfloats(uint4& words) {
        u32 own[4] = {words.x, words.y, words.z, words.w};
        float largest = 0;
        UNROLL
        for (int j = 0; j < 4; j++)
            largest = larger(
                largest, larger(size_of(float_of_bits(own[j] << 16)), size_of(float_of_bits(own[j] & 0xFFFF0000u))));
        const int field = half_field(largest_of_warp(largest));
        const float scale = float_of_bits((u32)field << 23);
        UNROLL
        for (int j = 0; j < 4; j++)
            own[j] = halves_of_floats(float_of_bits(own[j] << 16) * scale, float_of_bits(own[j] & 0xFFFF0000u) * scale);
        words = {own[0], own[1], own[2], own[3]};
        return float_of_bits((u32)(254 - field) << 23);
    }

    DEVICE float bias_of(int layer, int matrix, int row) const {
        if (step.bias[matrix] == nullptr) return 0;
        u32 bits = load_global(step.bias[matrix] + (long long)layer * step.size[matrix].rows + row);
        return step.bfloat ? float_of_bits(bits << 16) : float_of_half(bits);
    }
    DEVICE u16 rounded(float value) const {
        return (u16)(step.bfloat ? bfloats_of_floats(value, 0) : halves_of_floats(value, 0));
    }
    // ---- attention --------------------------------------------------------------------------------------------------

    // Where a key (0) or value (1) of a row's text lies.
    DEVICE u16* cached(int row, int layer, int which, int head, long long position) const {
        const long long line = ((long long)(layer * 2 + which) * step.kv_heads + head) * shared().room[row] + position;
        return (u16*)shared().address[row] + line * step.dimension;
    }

    // Cosines, then sines of each row's angles, the same in all layers.
    DEVICE void find_angles() {
        const int half = step.dimension / 2;
        for (int item = thread_index(); item < step.batch * half; item += THREADS) {
            const int row = item / half, d = item % half;
            const float angle = (float)shared().position[row] * load_global(step.frequency + d);
            float* const to = angles() + row * step.dimension + d;
            store_shared(to, cosine(angle) * step.rope_factor), store_shared(to + half, sine(angle) * step.rope_factor);
        }
        meet();
    }

    // A stretch of keys of a row's text and a key head; a row has `count` stretches from `first` on.
    struct Stretch {
        int row, head, number, first, count;
        long long begin, position; // the first key that is seen, the last
    };
    DEVICE bool find(int item, int window, Stretch& found) const {
        int left = item;
        for (found.row = 0; found.row < step.batch; found.row++) {
            found.position = load_shared(&shared().position[found.row]);
            if (found.position < 0) continue;
            found.begin = window > 0 && found.position + 1 > window ? found.position + 1 - window : 0;
            found.first = (int)(found.begin / STRETCH);
            found.count = (int)(found.position / STRETCH) - found.first + 1;
            if (left < found.count * step.kv_heads) break;
            left -= found.count * step.kv_heads;
        }
        found.head = left % step.kv_heads, found.number = found.first + left / step.kv_heads;
        return found.row < step.batch;
    }

    // What a layer will want beside its weights comes nearer while the one before is at work: the norms, and the keys and
    // values that the block will look at first.
    DEVICE void expect(int layer) const {
        if (block_index() == layer % grid_blocks())
            prefetch(step.norms + 2LL * layer * step.hidden, 2 * step.hidden * (int)sizeof(float));
        Stretch stretch;
        if (!find(block_index(), load_global(step.windows + layer), stretch)) return;
        const long long start = (long long)stretch.number * STRETCH;
        const int keys = (int)(stretch.position - start < STRETCH ? stretch.position - start : STRETCH);
        for (int which = 0; which < 2; which++)
            prefetch(cached(stretch.row, layer, which, stretch.head, start), keys * step.dimension * (int)sizeof(u16));
    }

    DEVICE void attend(int layer, int window) {
        const int group = step.heads / step.kv_heads;
        const int together = step.dimension > MOST_DIMENSION / 2 ? QUERIES / 2 : QUERIES;
        Stretch stretch;
        for (int item = block_index(); find(item, window, stretch); item += grid_blocks()) {
            for (int query = 0; query < group; query += together)
                attend_stretch(layer, stretch, query, smaller(together, group - query));
            if (stretch.count > 1) combine(stretch);
        }
    }

    // Up to four queries of a key head against a stretch of keys, of which a warp has its own. For the scores four lanes
    // share a key, each with every fourth eight of its dimensions; for the values a lane has four dimensions of all keys.
    DEVICE void attend_stretch(int layer, const Stretch& stretch, int query, int queries) {
        constexpr int KEYS = STRETCH / WARPS, ROUNDS = KEYS / 8;
        const int row = stretch.row, head = stretch.head;
        const long long start = (long long)stretch.number * STRETCH + warp() * KEYS;
        const bool newest = stretch.position / STRETCH == stretch.number && query == 0;
        // What is not seen is loaded from a place that is there, so that no load waits for a branch.
        const u16 *const keys = cached(row, layer, 0, head, 0), *const values = cached(row, layer, 1, head, 0);
        const auto seen = [&](long long key) { return key <= stretch.position && key >= stretch.begin; };
        const auto place = [&](long long key) { return (seen(key) ? key : stretch.position) * step.dimension; };
        uint4 key_words[4];
        uint2 value_words[8];
        const auto load_keys = [&](int r, int first) {
            const u16* const from = keys + place(start + 8 * r + (lane() >> 2));
            UNROLL
            for (int c = 0; c < 4; c++) {
                const int d = first + 32 * c;
                key_words[c] = load_fresh((const uint4*)(from + (d < step.dimension ? d : 0)));
            }
        };
        const auto load_values = [&](int r, int d) {
            UNROLL
            for (int k = 0; k < 8; k++)
                value_words[k] =
                    load_fresh((const uint2*)(values + place(start + 8 * r + k) + (d < step.dimension ? d : 0)));
        };
        // The first of them are on their way while queries are turned; the newest key is not there before.
        load_keys(0, 8 * (lane() & 3));
        load_values(0, 4 * lane());
        for (int vector = warp(); vector < queries + (newest ? 2 : 0); vector += WARPS)
            rotate(layer, row, head, stretch.position, query, vector < queries ? vector : vector - queries - 2);
        meet();
        if (newest && stretch.position >= start && stretch.position < start + 8) {
            load_keys(0, 8 * (lane() & 3));
            load_values(0, 4 * lane());
        }
        float odds[ROUNDS][QUERIES];
        UNROLL
        for (int r = 0; r < ROUNDS; r++) {
            UNROLL
            for (int g = 0; g < QUERIES; g++) odds[r][g] = 0;
            NO_UNROLL
            for (int first = 8 * (lane() & 3); first < step.dimension; first += 128) {
                if (r > 0 || first >= 128) load_keys(r, first);
                UNROLL
                for (int c = 0; c < 4; c++) {
                    const int d = first + 32 * c;
                    if (d >= step.dimension) break;
                    float key[8];
                    unpack(key, key_words[c]);
                    UNROLL
                    for (int g = 0; g < QUERIES; g++) {
                        const float4* const q = (const float4*)((const float*)stage() + g * step.dimension + d);
                        const float4 low = load_shared(q), high = load_shared(q + 1);
                        odds[r][g] += low.x * key[0] + low.y * key[1] + low.z * key[2] + low.w * key[3] +
                                      high.x * key[4] + high.y * key[5] + high.z * key[6] + high.w * key[7];
                    }
                }
            }
        }
        UNROLL
        for (int g = 0; g < QUERIES; g++) {
            float most = -INFINITE, total = 0;
            UNROLL
            for (int r = 0; r < ROUNDS; r++) {
                UNROLL
                for (int mask = 1; mask <= 2; mask *= 2) odds[r][g] += shuffle_xor(odds[r][g], mask);
                if (seen(start + 8 * r + (lane() >> 2))) most = larger(most, odds[r][g]);
            }
            UNROLL
            for (int mask = 4; mask <= 16; mask *= 2) most = larger(most, shuffle_xor(most, mask));
            UNROLL
            for (int r = 0; r < ROUNDS; r++) {
                const bool there = seen(start + 8 * r + (lane() >> 2));
                odds[r][g] = there ? exponential(odds[r][g] - most) : 0.0f;
                total += odds[r][g];
            }
            UNROLL
            for (int mask = 4; mask <= 16; mask *= 2) total += shuffle_xor(total, mask);
            if (lane() == 0) {
                store_shared(&shared().extremes[0][g][warp()], most);
                store_shared(&shared().extremes[1][g][warp()], total);
            }
        }
        float4* const own = (float4*)(stage() + QUERIES * MOST_DIMENSION * sizeof(float)) + warp() * KEYS;
        UNROLL
        for (int r = 0; r < ROUNDS; r++)
            if ((lane() & 3) == 0) store_shared(own + 8 * r + (lane() >> 2), four_of(odds[r]));
        synchronize_warp();
        NO_UNROLL
        for (int d = 4 * lane(); d < step.dimension; d += 128) {
            float mixed[QUERIES][4];
            UNROLL
            for (int g = 0; g < QUERIES; g++) UNROLL
            for (int j = 0; j < 4; j++) mixed[g][j] = 0;
            UNROLL
            for (int r = 0; r < ROUNDS; r++) {
                if (r > 0 || d >= 128) load_values(r, d);
                UNROLL
                for (int k = 0; k < 8; k++) {
                    const float4 odd = load_shared(own + 8 * r + k);
                    const float share[QUERIES] = {odd.x, odd.y, odd.z, odd.w};
                    float value[4];
                    unpack(value, value_words[k]);
                    // What is not there yet may be anything, also no number.
                    UNROLL
                    for (int j = 0; j < 4; j++) value[j] = seen(start + 8 * r + k) ? value[j] : 0.0f;
                    UNROLL
                    for (int g = 0; g < QUERIES; g++) UNROLL
                    for (int j = 0; j < 4; j++) mixed[g][j] = fused_multiply_add(share[g], value[j], mixed[g][j]);
                }
            }
            UNROLL
            for (int g = 0; g < QUERIES; g++)
                if (g < queries)
                    store_shared((float4*)(sums() + (warp() * queries + g) * step.dimension + d), four_of(mixed[g]));
        }
        meet();
        put_together(stretch, head * (step.heads / step.kv_heads) + query, queries);
        meet();
    }
    DEVICE static float4 four_of(const float (&from)[4]) { return {from[0], from[1], from[2], from[3]}; }

    // What all warps have of some queries.
    DEVICE void put_together(const Stretch& stretch, int query, int queries) {
        for (int item = thread_index(); item < queries * step.dimension; item += THREADS) {
            const int g = item / step.dimension, dimension = item % step.dimension;
            float highest = -INFINITE, sum = 0, value = 0;
            UNROLL
            for (int w = 0; w < WARPS; w++) highest = larger(highest, load_shared(&shared().extremes[0][g][w]));
            UNROLL
            for (int w = 0; w < WARPS; w++) {
                const float share = exponential(load_shared(&shared().extremes[0][g][w]) - highest);
                sum += share * load_shared(&shared().extremes[1][g][w]);
                value += share * load_shared(sums() + (w * queries + g) * step.dimension + dimension);
            }
            const long long place = (long long)stretch.row * step.heads + query + g;
            if (stretch.count == 1) {
                store_global(step.mixed + place * step.dimension + dimension, rounded(value / sum));
            } else {
                const long long at = place * step.stretches + stretch.number;
                store_global(step.partial + at * step.dimension + dimension, value);
                if (dimension < 2) store_global(step.extremes + 2 * at + dimension, dimension == 0 ? highest : sum);
            }
        }
    }

    // A query by its number, the key (-2) or the value (-1) of a key head: normed, turned by its position, and put on the
    // stage or into the cache.
    DEVICE void rotate(int layer, int row, int head, long long position, int query, int vector) {
        const int half = step.dimension / 2, group = step.heads / step.kv_heads;
        const float* const from = step.qkv + (long long)row * step.size[QKV].rows +
                                  (vector >= 0    ? (head * group + query + vector) * step.dimension
                                   : vector == -2 ? step.key_row + head * step.dimension
                                                  : step.value_row + head * step.dimension);
        const float* norms = vector >= 0 ? step.query_norms : vector == -2 ? step.key_norms : nullptr;
        float scale = 1;
        if (norms != nullptr) {
            norms += layer * step.dimension;
            float sum = 0;
            for (int d = lane(); d < step.dimension; d += 32) {
                float value = load_fresh(from + d);
                sum += value * value;
            }
            scale = inverse_root(sum_of_warp(sum) / step.dimension + step.epsilon);
        }
        const float* const turn = angles() + row * step.dimension;
        const float size = inverse_root((float)step.dimension);
        for (int d = lane(); d < half; d += 32) {
            float low = load_fresh(from + d), high = load_fresh(from + d + half);
            if (norms != nullptr) low *= scale * load_global(norms + d), high *= scale * load_global(norms + d + half);
            if (vector != -1) {
                const float c = load_shared(turn + d), s = load_shared(turn + half + d), old = low;
                low = old * c - high * s, high = high * c + old * s;
            }
            if (vector >= 0) {
                float* const to = (float*)stage() + vector * step.dimension + d;
                store_shared(to, low * size), store_shared(to + half, high * size);
            } else {
                u16* const to = cached(row, layer, vector + 2, head, position) + d;
                store_global(to, rounded(low)), store_global(to + half, rounded(high));
            }
        }
    }

    // The block that is the last to have looked at a stretch puts them together, in their order.
    DEVICE void combine(const Stretch& stretch) {
        constexpr int CHUNK = 4;
        if (thread_index() == 0) {
            u32* const counter = step.counters + 2 + stretch.row * step.kv_heads + stretch.head;
            const bool last = add_and_see(counter, 1) == (u32)stretch.count - 1;
            if (last) store_global(counter, 0u);
            store_shared(&shared().last, (int)last);
        }
        meet();
        if (load_shared(&shared().last)) {
            const int group = step.heads / step.kv_heads;
            for (int item = thread_index(); item < group * step.dimension; item += THREADS) {
                const long long place =
                    (long long)stretch.row * step.heads + stretch.head * group + item / step.dimension;
                const long long at = place * step.stretches + stretch.first;
                const float* const extremes = step.extremes + 2 * at;
                const float* const partial = step.partial + at * step.dimension + item % step.dimension;
                float highest = -INFINITE, sum = 0, value = 0;
                NO_UNROLL
                for (int s = 0; s < stretch.count; s += CHUNK) {
                    float most[CHUNK], total[CHUNK], mixed[CHUNK];
                    UNROLL
                    for (int i = 0; i < CHUNK; i++) {
                        const int own = smaller(s + i, stretch.count - 1);
                        most[i] = load_fresh(extremes + 2 * own), total[i] = load_fresh(extremes + 2 * own + 1);
                        mixed[i] = load_fresh(partial + (long long)own * step.dimension);
                    }
                    UNROLL
                    for (int i = 0; i < CHUNK; i++) {
                        if (s + i >= stretch.count) break;
                        const float higher = larger(highest, most[i]);
                        const float fade = exponential(highest - higher), share = exponential(most[i] - higher);
                        sum = sum * fade + share * total[i], value = value * fade + share * mixed[i];
                        highest = higher;
                    }
                }
                store_global(step.mixed + place * step.dimension + item % step.dimension, rounded(value / sum));
            }
        }
        meet();
    }

    template <int COUNT> DEVICE void unpack(float (&to)[COUNT], const u32 (&words)[COUNT / 2]) const {
        UNROLL
        for (int j = 0; j < COUNT / 2; j++) {
            to[2 * j] = step.bfloat ? float_of_bits(words[j] << 16) : float_of_half(words[j] & 0xFFFF);
            to[2 * j + 1] = step.bfloat ? float_of_bits(words[j] & 0xFFFF0000u) : float_of_half(words[j] >> 16);
        }
    }
    DEVICE void unpack(float (&to)[8], const uint4& from) const { unpack<8>(to, {from.x, from.y, from.z, from.w}); }
    DEVICE void unpack(float (&to)[4], const uint2& from) const { unpack<4>(to, {from.x, from.y}); }

    // ---- all of it --------------------------------------------------------------------------------------------------

    // All blocks have come, and what they wrote can be read.
    DEVICE void meet_all() {
        meet();
        if (thread_index() == 0) {
            met += grid_blocks();
            add_to(step.counters, 1);
            await_count(step.counters, met);
        }
        meet();
    }

    DEVICE void multiply_all() {
        const Size* const size = step.size;
        NO_UNROLL
        for (int layer = 0; layer < step.layers; layer++) {
            const float* const norms = step.norms + 2LL * layer * step.hidden;
            const int window = load_global(step.windows + layer);
            multiply_normed<EXTRA, false>(norms, size[QKV].rows, size[QKV].units,
                                          [this, layer](int row, int column, float value) {
                                              const int rows = step.size[QKV].rows;
                                              if (row >= rows || column >= step.batch) return;
                                              value += bias_of(layer, QKV, row);
                                              store_global(step.qkv + (long long)column * rows + row, value);
                                          });
            meet_all();
            attend(layer, window);
            meet_all();
            multiply_plain<EXTRA>(step.mixed, layer, OUTPUT);
            meet_all();
            multiply_normed<EXTRA, true>(
                norms + step.hidden, size[GATE_UP].rows, size[GATE_UP].units,
                [this, layer](int place, int column, float gate, float up) {
                    if (place >= step.intermediate || column >= step.batch) return;
                    const int row = place / 8 * 16 + place % 8;
                    gate += bias_of(layer, GATE_UP, row), up += bias_of(layer, GATE_UP, row + 8);
                    const float value = gate / (1.0f + exponential(-gate)) * up;
                    store_global(step.inner + (long long)column * step.intermediate + place, rounded(value));
                });
            meet_all();
            multiply_plain<EXTRA>(step.inner, layer, DOWN);
            meet_all();
        }
        multiply_normed<HEAD_EXTRA, false>(step.final_norm, step.head.rows, step.head.units,
                                           [this](int row, int column, float value) {
                                               if (row >= step.head.rows || column >= step.batch) return;
                                               u16* const to = step.logits + (long long)column * step.head.rows + row;
                                               store_global(to, (u16)halves_of_floats(value, 0));
                                           });
        if (thread_index() == 0 && add_and_see(step.counters + 1, 1) == (u32)grid_blocks() - 1)
            store_global(step.counters, 0u), store_global(step.counters + 1, 0u);
    }

    DEVICE void run() {
        if (thread_index() < MOST_SLOTS) {
            barrier_init(&shared().full[thread_index()], 1);
            barrier_init(&shared().empty[thread_index()], SLOT_UNITS);
            barriers_ready();
        }
        if (thread_index() < step.batch) {
            const int row = thread_index();
            store_shared(&shared().position[row], load_fresh(step.positions + row));
            store_shared(&shared().address[row], load_fresh(step.addresses + row));
            store_shared(&shared().room[row], load_fresh(step.room + row));
        }
        synchronize_block();
        if (warp() < WARPS) {
            take_registers<REGISTERS>();
            find_angles();
            multiply_all();
        } else {
            give_registers<COPIER_REGISTERS>();
            if (warp() == WARPS && lane() == 0) copy_all();
        }
    }
};

#ifdef OTARO_COLUMNS
using Chosen = Whole<OTARO_EXTRA, OTARO_HEAD_EXTRA, OTARO_COLUMNS>;
KERNEL __launch_bounds__(Chosen::THREADS + 32 * COPIERS, 1) step_kernel(PARAMETER Step step) { Chosen{step}.run(); }
#endif
