// A whole step of decoding, all layers and the head, in one launch: 1 … 16 tokens of any texts.
//
// One block stays on every multiprocessor. Its last warp does nothing but copy weights: it walks through all matrices in the
// order in which the other warps multiply them, as far ahead as the ring of slots in shared memory allows, so memory
// goes on delivering while the blocks wait for each other, look at keys and values, or are slow to begin. The other warps
// take phases in turn, after each of which all blocks meet:
//
//     query, key, value      of the normed residual stream
//     rotation               queries; keys and values into the cache
//     attention              a stretch of 128 keys of a text and a key head at a time; the last one puts them together
//     output                 added to the residual stream
//     gate, up               of the normed residual stream; silu(gate) · up
//     down                   added to the residual stream
//
// and the head in the end. A block has its own range of tiles of 16 rows of each matrix and all columns, eight units of
// which fill a slot. Warps stand side by side, 256 columns each, in several passes where there are more columns; what
// they add up for a tile goes through shared memory in a fixed order, so equal calls give equal bits, and a token's
// numbers depend on nothing that is beside it.

constexpr int SLOT_UNITS = 8, MOST_SLOTS = 16, STRETCH = 128, MOST_BATCH = 16;
constexpr int SUMS_BYTES = 32768, STEP_HEAD = 2048;
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
    float *x, *qkv, *query;                        // [batch][hidden], [batch][rows], [batch][heads · dimension]
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

    // Shared memory: barriers, what a block finds out once, sums of the warps (two sets), the ring.
    struct Shared {
        u64 full[MOST_SLOTS], empty[MOST_SLOTS];
        long long position[MOST_BATCH], address[MOST_BATCH], room[MOST_BATCH];
        float squares[16][MOST_BATCH];
        int last;
    };
    static_assert(sizeof(Shared) <= STEP_HEAD, "");
    DEVICE static Shared& shared() { return *(Shared*)shared_memory(); }
    DEVICE static float* sums() { return (float*)(shared_memory() + STEP_HEAD); }
    DEVICE static u8* slot(int number) { return shared_memory() + STEP_HEAD + SUMS_BYTES + number * SLOT; }

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
    template <int BITS, bool GATED, class Load, class Begun, class Store>
    DEVICE void multiply(int rows, int units, Load load, Begun begun, Store store) {
        int begin, count = share(rows, begin);
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
                    // Whoever has nothing to do with a slot waits for it too: a barrier knows odd from even, no more.
                    barrier_wait(&shared().full[place.slot], place.phase);
                    const bool mine = both ? (first - pass) / SLOT_UNITS == half : tile % (WARPS / SLOT_UNITS) == half;
                    if (mine && pass + own < units)
                        add_unit<BITS>(x, slot(place.slot), partial + (tile * WARPS + warp()) * SUMS, pass > 0);
                    synchronize_warp();
                    if (lane() == 0) barrier_arrive(&shared().empty[place.slot]);
                    next();
                }
            }
            meet();
            // Each tile is summed up by one warp, while the others begin with the next.
            for (int tile = warp(); tile < tiles; tile += WARPS) {
                float total[HELD];
                UNROLL
                for (int j = 0; j < HELD; j++) total[j] = 0;
                const float* from =
                    partial + (tile * WARPS + (both ? 0 : (tile % (WARPS / SLOT_UNITS)) * SLOT_UNITS)) * SUMS;
                for (int part = 0; part < used; part++, from += SUMS) {
                    if constexpr (COLUMNS == 1) {
                        total[0] += load_shared(from + (lane() & 15));
                    } else {
                        UNROLL
                        for (int n = 0; n < TILES; n++) {
                            float4 four = load_shared((const float4*)from + n * 32 + lane());
                            total[4 * n] += four.x, total[4 * n + 1] += four.y, total[4 * n + 2] += four.z,
                                total[4 * n + 3] += four.w;
                        }
                    }
                }
                store_tile<GATED>(begin + group + tile, total, store);
            }
            flushed++;
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

    // The residual stream times the weights of its norm, as half floats times a power of two for each row and unit; what
    // its norm divides by comes as a factor of the results. Squares of a row are added to `squares`.
    template <int BITS>
    DEVICE void load_normed(Activations<TILES>& x, const float* weight, int unit, float (&squares)[TILES]) {
        UNROLL
        for (int tile = 0; tile < TILES; tile++) {
            const int row = 8 * tile + (lane() >> 2), column = 256 * unit + 4 * (lane() & 3);
            float4 value[4][4];
            float largest = 0;
            UNROLL
            for (int g = 0; g < 4; g++) UNROLL
            for (int s = 0; s < 4; s++) {
                const int at = column + 64 * g + 16 * s;
                float4& v = value[g][s];
                v = {0, 0, 0, 0};
                if (row < step.batch && at < step.hidden) {
                    v = load_fresh((const float4*)(step.x + row * step.hidden + at));
                    float4 w = load_global((const float4*)(weight + at));
                    squares[tile] += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
                    v = {v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w};
                    largest =
                        larger(larger(larger(largest, size_of(v.x)), size_of(v.y)), larger(size_of(v.z), size_of(v.w)));
                }
            }
            UNROLL
            for (int mask = 1; mask <= 2; mask *= 2) largest = larger(largest, shuffle_xor(largest, mask));
            const int field = half_field(largest);
            const float scale = float_of_bits((u32)field << 23);
            UNROLL
            for (int g = 0; g < 4; g++) UNROLL
            for (int s = 0; s < 4; s++) {
                x.words[tile][g][2 * s] = halves_of_floats(value[g][s].x * scale, value[g][s].y * scale);
                x.words[tile][g][2 * s + 1] = halves_of_floats(value[g][s].z * scale, value[g][s].w * scale);
            }
            prepare_activations<BITS>(x, tile, float_of_bits((u32)(254 - field) << 23));
        }
    }
    DEVICE float squares_of(int tile, int unit) {
        const int row = 8 * tile + (lane() >> 2), column = 256 * unit + 4 * (lane() & 3);
        float sum = 0;
        for (int at = column; at < smaller(column + 256, step.hidden); at += 16)
            if (row < step.batch) {
                float4 v = load_fresh((const float4*)(step.x + row * step.hidden + at));
                sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            }
        return sum;
    }

    // What the norm of each of the lane's columns multiplies by, once all warps have added up their squares.
    DEVICE void share_squares(float (&squares)[TILES], int units, float (&factor)[TILES][2]) {
        UNROLL
        for (int tile = 0; tile < TILES; tile++) {
            for (int unit = warp() + WARPS; unit < units; unit += WARPS) squares[tile] += squares_of(tile, unit);
            squares[tile] += shuffle_xor(squares[tile], 1);
            squares[tile] += shuffle_xor(squares[tile], 2);
            if ((lane() & 3) == 0) store_shared(&shared().squares[warp()][8 * tile + (lane() >> 2)], squares[tile]);
        }
        meet();
        UNROLL
        for (int tile = 0; tile < TILES; tile++) UNROLL
        for (int j = 0; j < 2; j++) {
            const int column = 8 * tile + 2 * (lane() & 3) + j;
            float sum = 0;
            for (int w = 0; w < smaller(WARPS, units); w++) sum += load_shared(&shared().squares[w][column]);
            factor[tile][j] = inverse_root(sum / step.hidden + step.epsilon);
        }
    }

    template <int BITS, bool GATED, class Store>
    DEVICE void multiply_normed(const float* weight, int rows, int units, Store store) {
        float squares[TILES] = {}, factor[TILES][2];
        bool shared_already = false;
        multiply<BITS, GATED>(
            rows, units,
            [&](Activations<TILES>& x, int unit) {
                float unused[TILES] = {};
                load_normed<BITS>(x, weight, unit, shared_already ? unused : squares);
            },
            [&](Activations<TILES>& x) {
                if (!shared_already) {
                    // Where tiles are divided between two sets of warps, the second has the units of the first again.
                    if (!wide(units) && warp() >= SLOT_UNITS) UNROLL
                    for (int tile = 0; tile < TILES; tile++) squares[tile] = 0;
                    share_squares(squares, units, factor);
                    shared_already = true;
                }
                UNROLL
                for (int tile = 0; tile < TILES; tile++) UNROLL
                for (int j = 0; j < 2; j++) x.factor[tile][j] *= factor[tile][j];
            },
            store);
    }
    template <int BITS, class Store>
    DEVICE void multiply_plain(const u16* x, int columns, int rows, int units, Store store) {
        const Source source = {x, step.batch, columns, step.bfloat};
        multiply<BITS, false>(
            rows, units, [&](Activations<TILES>& words, int unit) { load_activations<BITS>(words, source, unit); },
            [](Activations<TILES>&) {}, store);
    }

    DEVICE float bias_of(int layer, int matrix, int row) const {
        if (step.bias[matrix] == nullptr) return 0;
        u32 bits = load_global(step.bias[matrix] + (long long)layer * step.size[matrix].rows + row);
        return step.bfloat ? float_of_bits(bits << 16) : float_of_half(bits);
    }
    DEVICE u16 rounded(float value) const {
        return (u16)(step.bfloat ? bfloats_of_floats(value, 0) : halves_of_floats(value, 0));
    }
    DEVICE auto add_to_stream(int layer, int matrix) {
        return [this, layer, matrix](int row, int column, float value) {
            if (row >= step.hidden || column >= step.batch) return;
            float* const to = step.x + column * step.hidden + row;
            store_global(to, load_fresh((const float*)to) + value + bias_of(layer, matrix, row));
        };
    }

    // ---- attention --------------------------------------------------------------------------------------------------

    // Where a key (0) or value (1) of a row's text lies.
    DEVICE u16* cached(int row, int layer, int which, int head, long long position) const {
        const long long line = ((long long)(layer * 2 + which) * step.kv_heads + head) * shared().room[row] + position;
        return (u16*)shared().address[row] + line * step.dimension;
    }

    DEVICE void rotate(int layer) {
        const int heads = step.heads + 2 * step.kv_heads, half = step.dimension / 2;
        for (int item = block_index() + grid_blocks() * warp(); item < step.batch * heads;
             item += grid_blocks() * WARPS) {
            const int row = item / heads, head = item % heads;
            const long long position = shared().position[row];
            if (position < 0) continue;
            const bool is_query = head < step.heads, is_value = head >= step.heads + step.kv_heads;
            const int start = is_query   ? head * step.dimension
                              : is_value ? step.value_row + (head - step.heads - step.kv_heads) * step.dimension
                                         : step.key_row + (head - step.heads) * step.dimension;
            const float* const from = step.qkv + (long long)row * step.size[QKV].rows + start;
            const float* norms = is_query ? step.query_norms : step.key_norms;
            float scale = 1;
            if (is_value) norms = nullptr;
            if (norms != nullptr) {
                norms += layer * step.dimension;
                float sum = 0;
                for (int d = lane(); d < step.dimension; d += 32) {
                    float value = load_fresh(from + d);
                    sum += value * value;
                }
                for (int mask = 1; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
                scale = inverse_root(sum / step.dimension + step.epsilon);
            }
            for (int d = lane(); d < half; d += 32) {
                float low = load_fresh(from + d), high = load_fresh(from + d + half);
                if (norms != nullptr)
                    low *= scale * load_global(norms + d), high *= scale * load_global(norms + d + half);
                if (!is_value) {
                    const float angle = (float)position * load_global(step.frequency + d);
                    const float c = cosine(angle) * step.rope_factor, s = sine(angle) * step.rope_factor, old = low;
                    low = old * c - high * s, high = high * c + old * s;
                }
                if (is_query) {
                    float* const to = step.query + ((long long)row * step.heads + head) * step.dimension;
                    store_global(to + d, low), store_global(to + d + half, high);
                } else {
                    u16* const to = cached(row, layer, is_value, (head - step.heads) % step.kv_heads, position);
                    store_global(to + d, rounded(low)), store_global(to + d + half, rounded(high));
                }
            }
        }
    }

    DEVICE void attend(int layer) {
        const int window = load_global(step.windows + layer);
        for (int item = block_index();; item += grid_blocks()) {
            int row = 0, left = item, first = 0, count = 0;
            long long position = -1, begin = 0;
            for (; row < step.batch; row++) {
                position = shared().position[row];
                if (position < 0) continue;
                begin = window > 0 && position + 1 > window ? position + 1 - window : 0;
                first = (int)(begin / STRETCH), count = (int)(position / STRETCH) - first + 1;
                if (left < count * step.kv_heads) break;
                left -= count * step.kv_heads;
            }
            if (row == step.batch) return;
            const int head = left % step.kv_heads, stretch = first + left / step.kv_heads;
            const int group = step.heads / step.kv_heads;
            for (int query = 0; query < group; query += 4)
                attend_stretch(layer, row, head, head * group + query, smaller(4, group - query), stretch, begin,
                               position, count == 1);
            if (count > 1) combine(row, head, first, count);
        }
    }

    // Up to four queries of a key head against a stretch of keys. A lane has eight dimensions of a key, so several keys
    // are looked at side by side; a warp has its own keys, and warps are put together in the end.
    DEVICE void attend_stretch(int layer, int row, int head, int query, int queries, int stretch, long long begin,
                               long long position, bool alone) {
        constexpr int KEYS = STRETCH / WARPS, CHUNK = 4;
        const int lanes = step.dimension / 8, beside = 32 / lanes, own = lane() / lanes, d = 8 * (lane() % lanes);
        const long long start = (long long)stretch * STRETCH + warp() * KEYS;
        const float size = inverse_root((float)step.dimension);
        float q[4][8], mixed[4][8], most[4], total[4];
        UNROLL
        for (int g = 0; g < 4; g++) {
            most[g] = -INFINITE, total[g] = 0;
            UNROLL
            for (int j = 0; j < 8; j++) q[g][j] = mixed[g][j] = 0;
            if (g >= queries) continue;
            const float* from = step.query + ((long long)row * step.heads + query + g) * step.dimension + d;
            UNROLL
            for (int j = 0; j < 2; j++) {
                float4 four = load_fresh((const float4*)from + j);
                q[g][4 * j] = four.x, q[g][4 * j + 1] = four.y, q[g][4 * j + 2] = four.z, q[g][4 * j + 3] = four.w;
            }
        }
        NO_UNROLL
        for (int chunk = 0; chunk < KEYS; chunk += CHUNK * beside) {
            uint4 keys[CHUNK], values[CHUNK];
            bool seen[CHUNK];
            UNROLL
            for (int i = 0; i < CHUNK; i++) {
                const int key = chunk + i * beside + own;
                seen[i] = key < KEYS && start + key <= position && start + key >= begin;
                keys[i] = values[i] = {0, 0, 0, 0};
                if (!seen[i]) continue;
                keys[i] = load_fresh((const uint4*)(cached(row, layer, 0, head, start + key) + d));
                values[i] = load_fresh((const uint4*)(cached(row, layer, 1, head, start + key) + d));
            }
            float odds[4][CHUNK];
            UNROLL
            for (int i = 0; i < CHUNK; i++) {
                float key[8];
                unpack(key, keys[i]);
                UNROLL
                for (int g = 0; g < 4; g++) {
                    float sum = 0;
                    UNROLL
                    for (int j = 0; j < 8; j++) sum += q[g][j] * key[j];
                    for (int mask = 1; mask < lanes; mask *= 2) sum += shuffle_xor(sum, mask);
                    odds[g][i] = seen[i] ? sum * size : -INFINITE;
                }
            }
            UNROLL
            for (int g = 0; g < 4; g++) {
                float higher = most[g];
                UNROLL
                for (int i = 0; i < CHUNK; i++) higher = larger(higher, odds[g][i]);
                for (int mask = lanes; mask < 32; mask *= 2) higher = larger(higher, shuffle_xor(higher, mask));
                const float level = higher == -INFINITE ? 0 : higher, fade = exponential(most[g] - level);
                most[g] = higher, total[g] *= fade;
                UNROLL
                for (int j = 0; j < 8; j++) mixed[g][j] *= fade;
                UNROLL
                for (int i = 0; i < CHUNK; i++) odds[g][i] = exponential(odds[g][i] - level), total[g] += odds[g][i];
            }
            UNROLL
            for (int i = 0; i < CHUNK; i++) {
                float value[8];
                unpack(value, values[i]);
                UNROLL
                for (int g = 0; g < 4; g++) UNROLL
                for (int j = 0; j < 8; j++) mixed[g][j] += odds[g][i] * value[j];
            }
        }
        UNROLL
        for (int g = 0; g < 4; g++) {
            for (int mask = lanes; mask < 32; mask *= 2) total[g] += shuffle_xor(total[g], mask);
            UNROLL
            for (int j = 0; j < 8; j++)
                for (int mask = lanes; mask < 32; mask *= 2) mixed[g][j] += shuffle_xor(mixed[g][j], mask);
            put_together(row, query + g, g < queries, stretch, alone, d, own == 0, most[g], total[g], mixed[g]);
        }
    }

    // What all warps have of a query: dimensions, then the largest score and the sum of the odds.
    DEVICE void put_together(int row, int query, bool there, int stretch, bool alone, int d, bool writes, float most,
                             float total, const float (&mixed)[8]) {
        if (!there) return;
        const int line = step.dimension + 2;
        float* const own = sums() + warp() * line;
        if (writes) UNROLL
        for (int j = 0; j < 8; j++) store_shared(own + d + j, mixed[j]);
        if (lane() == 0) store_shared(own + step.dimension, most), store_shared(own + step.dimension + 1, total);
        meet();
        const int dimension = thread_index();
        if (dimension < step.dimension) {
            float highest = -INFINITE, sum = 0, value = 0;
            for (int w = 0; w < WARPS; w++) highest = larger(highest, load_shared(sums() + w * line + step.dimension));
            for (int w = 0; w < WARPS; w++) {
                const float share = exponential(load_shared(sums() + w * line + step.dimension) - highest);
                sum += share * load_shared(sums() + w * line + step.dimension + 1);
                value += share * load_shared(sums() + w * line + dimension);
            }
            const long long place = (long long)row * step.heads + query;
            if (alone) {
                store_global(step.mixed + place * step.dimension + dimension, rounded(value / sum));
            } else {
                const long long at = place * step.stretches + stretch;
                store_global(step.partial + at * step.dimension + dimension, value);
                if (dimension < 2) store_global(step.extremes + 2 * at + dimension, dimension == 0 ? highest : sum);
            }
        }
        meet();
    }

    // The block that is the last to have looked at a stretch puts them together, in their order.
    DEVICE void combine(int row, int head, int first, int count) {
        if (thread_index() == 0) {
            u32* const counter = step.counters + 2 + row * step.kv_heads + head;
            const bool last = add_and_see(counter, 1) == (u32)count - 1;
            if (last) store_global(counter, 0u);
            store_shared(&shared().last, (int)last);
        }
        meet();
        if (load_shared(&shared().last)) {
            const int group = step.heads / step.kv_heads;
            for (int item = thread_index(); item < group * step.dimension; item += THREADS) {
                const long long place = (long long)row * step.heads + head * group + item / step.dimension;
                const float* const extremes = step.extremes + 2 * (place * step.stretches + first);
                const float* const partial =
                    step.partial + (place * step.stretches + first) * step.dimension + item % step.dimension;
                float highest = -INFINITE, sum = 0, value = 0;
                for (int s = 0; s < count; s++) highest = larger(highest, load_fresh(extremes + 2 * s));
                for (int s = 0; s < count; s++) {
                    const float share = exponential(load_fresh(extremes + 2 * s) - highest);
                    sum += share * load_fresh(extremes + 2 * s + 1);
                    value += share * load_fresh(partial + (long long)s * step.dimension);
                }
                store_global(step.mixed + place * step.dimension + item % step.dimension, rounded(value / sum));
            }
        }
        meet();
    }

    DEVICE void unpack(float (&to)[8], const uint4& from) const {
        const u32 words[4] = {from.x, from.y, from.z, from.w};
        UNROLL
        for (int j = 0; j < 4; j++) {
            to[2 * j] = step.bfloat ? float_of_bits(words[j] << 16) : float_of_half(words[j] & 0xFFFF);
            to[2 * j + 1] = step.bfloat ? float_of_bits(words[j] & 0xFFFF0000u) : float_of_half(words[j] >> 16);
        }
    }

    // ---- all of it --------------------------------------------------------------------------------------------------

    // All blocks have come, and what they wrote can be read.
    DEVICE void meet_all() {
        meet();
        if (thread_index() == 0) {
            met += grid_blocks();
            add_and_see(step.counters, 1);
            await_count(step.counters, met);
        }
        meet();
    }

    DEVICE void multiply_all() {
        const Size* const size = step.size;
        NO_UNROLL
        for (int layer = 0; layer < step.layers; layer++) {
            const float* const norms = step.norms + 2LL * layer * step.hidden;
            multiply_normed<EXTRA, false>(norms, size[QKV].rows, size[QKV].units,
                                          [this, layer](int row, int column, float value) {
                                              const int rows = step.size[QKV].rows;
                                              if (row >= rows || column >= step.batch) return;
                                              value += bias_of(layer, QKV, row);
                                              store_global(step.qkv + (long long)column * rows + row, value);
                                          });
            meet_all();
            rotate(layer);
            meet_all();
            attend(layer);
            meet_all();
            multiply_plain<EXTRA>(step.mixed, size[OUTPUT].columns, size[OUTPUT].rows, size[OUTPUT].units,
                                  add_to_stream(layer, OUTPUT));
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
            multiply_plain<EXTRA>(step.inner, step.intermediate, size[DOWN].rows, size[DOWN].units,
                                  add_to_stream(layer, DOWN));
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
            barrier_init(&shared().empty[thread_index()], WARPS);
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
