// What an instruction set provides: one function per operation, each over a range of groups (or rows, or codes). Sizes and
// scales have been checked before.
#pragma once

#include <cstdint>

#include "otaro_core.h"

namespace otaro {

struct Geometry {
    int64_t rows, columns;
    int64_t groups; // in a row
    int group_size;
};

// Visits groups [first, last) of a tensor, numbered through all rows: body(group, offset of its first weight, weights).
template <class Body>
static inline void for_groups(const Geometry& geometry, int64_t first, int64_t last, const Body& body) {
    if (first >= last) return;
    int64_t row = first / geometry.groups, column = first % geometry.groups * geometry.group_size;
    for (int64_t group = first; group < last; ++group) {
        const int64_t rest = geometry.columns - column;
        const int weights = rest < geometry.group_size ? static_cast<int>(rest) : geometry.group_size;
        if (!body(group, row * geometry.columns + column, weights)) return;
        column += geometry.group_size;
        if (column >= geometry.columns) {
            column = 0;
            ++row;
        }
    }
}

// Weights in groups; `scale`: those to encode with, null where they must be found.
struct Weights {
    Geometry geometry;
    otaro_format format;
    const void* weight;
    int dtype;
    const uint8_t* scale;
};

struct ScalesJob {
    Weights from;
    uint8_t* scale;
};

struct EncodeJob {
    Weights from;
    int mantissa;
    otaro_codes codes;
};

struct PackJob {
    Weights from;
    otaro_planes planes;
};

// The weights that decide a code, the first freely, each further one within the cell that the one before it chose.
struct Deciding {
    const void* weight[OTARO_WIDTHS + 1];
    int mantissa[OTARO_WIDTHS + 1]; // down to which each decides
    int count;
};

struct QuantizeJob {
    Weights from;      // decides the scales
    Deciding deciding; // the codes
    int mantissa;
    void* value;
};

struct DecodeJob {
    Geometry geometry;
    otaro_format format;
    otaro_codes codes;
    int mantissa;
    void* value;
    int dtype;
};

struct TruncateJob {
    int scheme;
    const int16_t* code;
    int from, to;
    int16_t* result;
};

struct PlanesJob {
    Geometry geometry;
    otaro_format format;
    otaro_planes planes;
    int mantissa;
    int dtype;
};

struct LinearJob {
    PlanesJob weight;
    const float* x;
    int64_t batch;
    const float* bias;
    float* y;
};

// What a range of weights turned out to hold.
struct Findings {
    int64_t below = 0, above = 0; // groups whose exponent was clamped
    int64_t not_finite = -1;      // flat index of the first weight that is not finite; the rest was not looked at
};

struct Kernels {
    void (*scales)(const ScalesJob&, int64_t first, int64_t last);
    void (*encode)(const EncodeJob&, int64_t first, int64_t last, Findings&);
    void (*pack)(const PackJob&, int64_t first, int64_t last, Findings&);
    void (*quantize)(const QuantizeJob&, int64_t first, int64_t last);
    void (*decode)(const DecodeJob&, int64_t first, int64_t last);
    void (*truncate)(const TruncateJob&, int64_t first, int64_t last);              // codes
    void (*dequantize)(const PlanesJob&, int64_t first, int64_t last, void* value); // value: of the first group
    void (*linear)(const LinearJob&, int64_t first, int64_t last);                  // rows
};

// One table per source file; a null pointer where the compiler's target lacks the instructions.
extern const Kernels* const kernels_ref;
extern const Kernels* const kernels_avx2;
extern const Kernels* const kernels_avx512;
extern const Kernels* const kernels_neon;

} // namespace otaro
