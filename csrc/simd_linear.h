// A packed matrix times a few vectors: a few rows of it are decoded into L1, piece by piece, and serve all the vectors.
#pragma once

#include "simd.h"
#include "simd_decode.h"

namespace otaro {
namespace {

constexpr int kTile = 512;     // columns decoded at a time, a multiple of every group size
constexpr int kRowTile = 4;    // rows decoded at a time: 8 KiB with kTile, and each piece of x serves all of them
constexpr int kBatchTile = 16; // vectors that share one decoding

// sum[r * kBatchTile + b] += weight[r] . x[b] for kRows rows and kCount vectors. A sum is taken in the same order whatever
// kRows and kCount are, so a vector's result does not depend on its company.
template <class V, int kRows, int kCount>
void dots(const float (*weight)[kTile], const float* x, int64_t stride, int length, float* sum) {
    constexpr int kChains = 2; // independent sums, to hide the latency of an addition
    typename V::F total[kRows][kCount][kChains];
    for (int r = 0; r < kRows; ++r) {
        for (int b = 0; b < kCount; ++b) {
            for (int c = 0; c < kChains; ++c) total[r][b][c] = V::set1(0.0f);
        }
    }
    int i = 0;
    const auto step = [&](int chain) {
        for (int b = 0; b < kCount; ++b) {
            const typename V::F part = V::load(x + b * stride + i);
            for (int r = 0; r < kRows; ++r) {
                total[r][b][chain] = V::fma(V::load(weight[r] + i), part, total[r][b][chain]);
            }
        }
        i += V::kLanes;
    };
    while (i + kChains * V::kLanes <= length) {
        for (int c = 0; c < kChains; ++c) step(c);
    }
    if (i + V::kLanes <= length) step(0);
    for (int r = 0; r < kRows; ++r) {
        for (int b = 0; b < kCount; ++b) {
            float rest = 0;
            for (int j = i; j < length; ++j) rest += weight[r][j] * x[b * stride + j];
            sum[r * kBatchTile + b] += V::sum(V::add(total[r][b][0], total[r][b][1])) + rest;
        }
    }
}

// The same for a whole tile, in steps of two rows and of four vectors.
template <class V>
void tile_dots(const float (*weight)[kTile], int rows, const float* x, int64_t stride, int batch, int length,
               float* sum) {
    const auto all_rows = [&](auto count, int b) {
        constexpr int kCount = decltype(count)::value;
        float* const column = sum + b;
        int r = 0;
        for (; r + 2 <= rows; r += 2)
            dots<V, 2, kCount>(weight + r, x + b * stride, stride, length, column + r * kBatchTile);
        if (r < rows) dots<V, 1, kCount>(weight + r, x + b * stride, stride, length, column + r * kBatchTile);
    };
    int b = 0;
    for (; b + 4 <= batch; b += 4) all_rows(Number<4>(), b);
    for (; b < batch; ++b) all_rows(Number<1>(), b);
}

template <class V> void linear(const LinearJob& job, int64_t first, int64_t last) {
    const Geometry& geometry = job.weight.geometry;
    const int size = geometry.group_size;
    with_planes(stored_mantissa(job.weight.format.scheme, job.weight.mantissa) - kNarrowest, [&](auto planes) {
        for (int64_t row = first; row < last; row += kRowTile) {
            const int rows = static_cast<int>(last - row < kRowTile ? last - row : kRowTile);
            for (int64_t start = 0; start < job.batch; start += kBatchTile) {
                const int batch = static_cast<int>(job.batch - start < kBatchTile ? job.batch - start : kBatchTile);
                float sum[kRowTile * kBatchTile] = {};
                for (int64_t column = 0; column < geometry.columns; column += kTile) {
                    float tile[kRowTile][kTile];
                    const int64_t rest = geometry.columns - column;
                    const int length = static_cast<int>(rest < kTile ? rest : kTile);
                    for (int r = 0; r < rows; ++r) {
                        const int64_t group = (row + r) * geometry.groups + column / size;
                        for (int g = 0; g * size < length; ++g) {
                            dequantize_group<V, float, decltype(planes)::value>(job.weight, group + g,
                                                                                tile[r] + g * size);
                        }
                    }
                    const float* const x = job.x + start * geometry.columns + column;
                    tile_dots<V>(tile, rows, x, geometry.columns, batch, length, sum);
                }
                for (int r = 0; r < rows; ++r) {
                    const float bias = job.bias != nullptr ? job.bias[row + r] : 0.0f;
                    for (int b = 0; b < batch; ++b)
                        job.y[(start + b) * geometry.rows + row + r] = sum[r * kBatchTile + b] + bias;
                }
            }
        }
    });
}

} // namespace
} // namespace otaro
