// What an instruction set provides for running a model. Sizes have been checked before.
//
// A product multiplies a matrix of codes with activations quantised to integers, a span of one or two blocks at a time:
//
//     y[n] = sum over spans of  step[n] * scale * (sum of code[n, k] * x[k]  +  bias * sum of x[k])
//
// where x are integers, `scale` theirs, `step` the group's and `bias` the width's. The sums in brackets are exact, so the
// result does not depend on the instruction set, the number of threads or how many activations are multiplied at a time;
// the few float operations around them are the same everywhere.
//
// Activations have 8 bits, or 16 bits as two bytes: x = 256 * coarse + fine. Whether the second byte is used is up to the
// caller: it costs one more dot product a step, which little matters where reading the weights takes longer anyway.
#pragma once

#include <cmath>
#include <utility>

#include "tiles.h"

namespace otaro {

struct Activations {
    int8_t* coarse;
    int8_t* fine;    // null: 8 bits are enough
    int16_t* words;  // with `fine`: both bytes as one number; of each 4 columns first 0 and 2, then 1 and 3
    float* scale;    // one a span, step_constant included
    float* offset;   // scale * bias * sum of x, one a span
    int64_t columns; // of a row, whole blocks
    int64_t spans;
    int64_t stride; // scales and offsets from one row to the next, the same for spans of any length
    int span_blocks;
    int together; // rows whose blocks lie side by side: kRowsTogether, or 1 where there is but one row
};

// Of eight rows the first block of each, then the second and so on: a kernel that takes several rows finds all of them at
// fixed distances from one pointer.
constexpr int kRowsTogether = 8;
static inline int rows_together(int64_t rows) { return rows > 1 ? kRowsTogether : 1; }
static inline int64_t activation_place(const Activations& x, int64_t row, int64_t column) {
    const int64_t number = row % x.together, block = column / kBlockColumns;
    return (row - number) * x.columns + (block * x.together + number) * kBlockColumns + column % kBlockColumns;
}

// Blocks of activations that share a scale. With 8 bits two cost perplexity from E5M5 on, where the weights' own
// error is small; below it, and with 16 bits, they cost nothing.
constexpr int kMostSpan = 2;
static inline int span_blocks(const Tiles& tiles, bool fine, int mantissa) {
    return tiles.group_blocks % kMostSpan == 0 && (fine || mantissa <= 4) ? kMostSpan : 1;
}

// Rows are quantised by several threads at once: none writes to a line of the cache that another one writes to.
static inline int64_t scale_stride(int64_t blocks) { return (blocks + 15) / 16 * 16; }

struct Product {
    const Tiles* weight;
    int mantissa;
    const Activations* x;
    int64_t batch;
    const float* bias; // null: none
    float* y;
    int64_t y_stride;
    bool add; // to what is in y already
};

// What activations of a largest magnitude are multiplied by to become integers up to `most`, and what one of these is worth.
// One that is not finite makes the whole block, and what is computed from it, not a number: it must not go unnoticed.
static inline std::pair<float, float> activation_unit(float extent, float most) {
    if (extent == 0) return {0.0f, 0.0f};
    if (!(extent < INFINITY)) return {0.0f, NAN};
    return {most / extent, extent / most};
}

// A tile with two bytes for each weight, and room for the tiles that are unpacked at a time.
static inline int64_t unpacked_bytes(const Tiles& tiles) { return 2 * tiles.blocks * kSteps * kStepBytes; }
static inline int64_t product_scratch(const Tiles& tiles) { return 2 * unpacked_bytes(tiles); }

constexpr int64_t kMostTiles = 4;   // side by side in any kernel
constexpr int64_t kUnpackFrom = 24; // rows of activations from which a tile is unpacked beforehand

// Keys and values of one layer as float16. Keys lie 16 positions side by side, [position / 16][dimension][16], so that a
// query meets 16 keys at a time; values lie [position][dimension]. Both a head at a time, dimensions padded to 16.
constexpr int kKeyBlock = 16, kMostHeadDimension = 1024;

// Or as SEFP codes of the scheme "nested", in groups of 64 along a head's dimensions. The row of a head at a position is, for
// every 32 dimensions, 16 bytes of base and 4 bytes of each bit plane of the width, as in the files, then the scale of each
// group. Both keys and values lie [head][position][row].
constexpr int kCacheGroup = 64;

struct Cache {
    int mantissa; // 0: float16
    int dimension, padded_dimension;
    int64_t row_bytes;
};

static inline int64_t cache_block_bytes(int mantissa) { return kBlock / 2 + kBlock / 8 * (mantissa - kNarrowest); }

static inline Cache cache_layout(int mantissa, int dimension) {
    const auto round_up = [](int value, int multiple) { return (value + multiple - 1) / multiple * multiple; };
    if (mantissa == 0) {
        const int padded = round_up(dimension, kKeyBlock);
        return {0, dimension, padded, padded * static_cast<int64_t>(sizeof(Half))};
    }
    const int padded = round_up(dimension, kBlock), groups = round_up(dimension, kCacheGroup) / kCacheGroup;
    return {mantissa, dimension, padded, padded / kBlock * cache_block_bytes(mantissa) + groups};
}

struct Attention {
    const float* query; // [row][head][head_dimension]
    int64_t query_stride;
    const uint8_t* keys;
    const uint8_t* values;
    Cache cache;
    int64_t capacity; // positions, a multiple of 16
    int head_dimension, padded_dimension, heads, kv_heads;
    int64_t position, count; // of the first query; queries
    int64_t window;          // positions a query sees, itself included
    float scale;
    float* out; // [row][head][head_dimension]
    int64_t out_stride;
};

constexpr int kQueryBlock = 4; // queries that share one reading of the keys and values

// A task is a block of rows with up to kQueryBlock heads that share keys; where keys are coded, with all that do, so that
// they are decoded once.
static inline int64_t head_parts(const Attention& job) {
    return job.cache.mantissa == 0 ? (job.heads / job.kv_heads + kQueryBlock - 1) / kQueryBlock : 1;
}
static inline int64_t attention_tasks(const Attention& job) {
    return (job.count + kQueryBlock - 1) / kQueryBlock * job.kv_heads * head_parts(job);
}
static inline int64_t attention_scratch(const Cache& cache, int64_t capacity, int64_t heads_per_key) { // floats
    if (cache.mantissa == 0) return kQueryBlock * capacity;
    // Scores, sums of values, and rows that have been decoded.
    const int64_t queries = heads_per_key * kQueryBlock;
    return queries * capacity + (queries + kKeyBlock) * cache.padded_dimension;
}

constexpr int64_t kSumBlock = 1024; // weights added up at a time where tokens are picked
constexpr int kSumLanes = 16;       // sums that a block is added up in, whatever the vectors: so the sum is the same

struct EngineKernels {
    void (*multiply)(const Product&, int64_t first_tile, int64_t last_tile, uint8_t* scratch);
    // One row of activations for a product at a width; `x` is padded with zeros.
    void (*quantize)(const float* x, int64_t length, int mantissa, const Activations& to, int64_t row);
    void (*normalize)(const float* x, const float* weight, int64_t length, float epsilon, float* result);
    void (*rotate)(float* heads, int64_t count, int dimension, const float* cosine, const float* sine);
    void (*swiglu)(const float* gate, const float* up, int64_t length, float* result);
    void (*store_keys)(const float* key, const float* value, int dimension, int padded, int64_t position, Half* keys,
                       Half* values); // of one head
    void (*attend)(const Attention&, int64_t first_task, int64_t last_task, float* scratch);
    void (*encode_row)(const float* x, const Cache&, uint8_t* row);
    void (*decode_row)(const uint8_t* row, const Cache&, float* x); // padded dimensions
    void (*attend_coded)(const Attention&, int64_t first_task, int64_t last_task, float* scratch);
    // For picking tokens, to the same bits on every instruction set; sums take multiples of 16.
    bool (*largest)(const float* x, int64_t length, int64_t* place); // of the first of them; false: not all are finite
    double (*exponentials)(const float* x, int64_t length, float most, float scale, float* result); // their sum
    void (*sums)(const float* x, int64_t length, float least, float* sums); // of those not below, block by block
    // The places of those not below `low` but below `high`, and how many; it ends once there are more than `most`.
    int64_t (*places)(const float* x, int64_t length, float low, float high, int64_t most, int32_t* result);
};

extern const EngineKernels* const engine_kernels_ref;
extern const EngineKernels* const engine_kernels_avx2;
extern const EngineKernels* const engine_kernels_avx512;
extern const EngineKernels* const engine_kernels_neon;

// The kernels for an `otaro_isa`; where the machine has AVX-512 without its dot products, those of AVX2.
const EngineKernels* engine_kernels_for(int32_t isa);

} // namespace otaro
