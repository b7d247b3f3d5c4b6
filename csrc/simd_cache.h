// Attention over keys and values kept as SEFP codes, and the table of all the engine's kernels.
//
// Rows are decoded 16 positions at a time into L1 and serve all queries of a task from there. Every query meets the rows in
// the same order with the same operations whatever queries come with it, as in simd_layers.h.
#pragma once

#include "engine_kernels.h"
#include "simd_encode.h"
#include "simd_layers.h"
#include "simd_sampling.h"

namespace otaro {
namespace {

template <class V> void encode_row(const float* x, const Cache& cache, uint8_t* row) {
    const int planes = cache.mantissa - kNarrowest;
    const int64_t block_bytes = cache_block_bytes(cache.mantissa);
    uint8_t* scales = row + cache.padded_dimension / kBlock * block_bytes;
    for (int start = 0; start < cache.dimension; start += kCacheGroup) {
        float buffer[kCacheGroup];
        const int count = cache.dimension - start < kCacheGroup ? cache.dimension - start : kCacheGroup;
        const int size = (count + kBlock - 1) / kBlock * kBlock;
        const float* const values = padded<float>(x + start, count, size, buffer);
        const int scale = find_scale<V>(values, size, count, OTARO_NESTED, measure<V>(values, size));
        *scales++ = static_cast<uint8_t>(scale);
        encode_group<V>(values, size, OTARO_NESTED, scale, kWidest, [&](int i, const Block<V>& block) {
            uint8_t* const to = row + (start + i) / kBlock * block_bytes;
            uint32_t words[OTARO_BIT_PLANES];
            V::pack(block, to, words);
            memcpy(to + kBlock / 2, words, static_cast<size_t>(planes) * sizeof *words);
        });
    }
}

template <class V, int kPlanes> void decode_planes(const uint8_t* row, const Cache& cache, float* x) {
    constexpr int kMantissa = kNarrowest + kPlanes;
    constexpr int64_t kBytes = kBlock / 2 + kBlock / 8 * kPlanes;
    const uint8_t* const scales = row + cache.padded_dimension / kBlock * kBytes;
    for (int start = 0; start < cache.padded_dimension; start += kBlock) {
        const NestedDecoder<V> decoder(scales[start / kCacheGroup], kMantissa);
        // `unpack` finds the word of a plane behind the plane's beginning; here a plane is one word.
        uint8_t* const base = const_cast<uint8_t*>(row) + start / kBlock * kBytes;
        uint8_t* planes[OTARO_BIT_PLANES];
        for (int p = 0; p < kPlanes; ++p) planes[p] = base + kBlock / 2 + kBlock / 8 * p;
        Block<V> block;
        V::template unpack<kPlanes>(base, planes, 0, block);
        for (int v = 0; v < Block<V>::kParts; ++v) V::store(x + start + v * V::kLanes, decoder(block.part[v]));
    }
}

template <class V> void decode_row(const uint8_t* row, const Cache& cache, float* x) {
    with_planes(cache.mantissa - kNarrowest,
                [&](auto planes) { decode_planes<V, decltype(planes)::value>(row, cache, x); });
}

// scores[q] = query[q] . key * scale, the last dimensions, which fill no vector, one by one.
template <class V, int kQueries>
void coded_scores(const Attention& job, const float* query, const float* key, float* scores) {
    typename V::F sum[kQueries];
    for (int q = 0; q < kQueries; ++q) sum[q] = V::set1(0);
    int d = 0;
    for (; d + V::kLanes <= job.head_dimension; d += V::kLanes) {
        const typename V::F part = V::load(key + d);
        for (int q = 0; q < kQueries; ++q) sum[q] = V::fma(V::load(query + q * job.query_stride + d), part, sum[q]);
    }
    for (int q = 0; q < kQueries; ++q) {
        float total = V::sum(sum[q]);
        for (int i = d; i < job.head_dimension; ++i) total += query[q * job.query_stride + i] * key[i];
        scores[q * job.capacity] = total * job.scale;
    }
}

// out[q] += the sum of scores[q] * value over `count` rows, kVectors vectors of dimensions from `start` on.
template <class V, int kQueries, int kVectors>
void coded_weigh(const Attention& job, const float* scores, const float* values, int count, int start, float* out) {
    typename V::F sum[kQueries][kVectors];
    for (int q = 0; q < kQueries; ++q) {
        for (int v = 0; v < kVectors; ++v) sum[q][v] = V::load(out + q * job.padded_dimension + start + v * V::kLanes);
    }
    for (int i = 0; i < count; ++i) {
        const float* const value = values + i * job.padded_dimension + start;
        for (int q = 0; q < kQueries; ++q) {
            const typename V::F weight = V::set1(scores[q * job.capacity + i]);
            for (int v = 0; v < kVectors; ++v) sum[q][v] = V::fma(weight, V::load(value + v * V::kLanes), sum[q][v]);
        }
    }
    for (int q = 0; q < kQueries; ++q) {
        for (int v = 0; v < kVectors; ++v) V::store(out + q * job.padded_dimension + start + v * V::kLanes, sum[q][v]);
    }
}

template <class V, int kQueries>
void attend_coded_queries(const Attention& job, int64_t row, int64_t kv, float* scratch) {
    const int64_t group = job.heads / job.kv_heads, padded_dimension = job.padded_dimension;
    const int64_t position = job.position + row, last = position + kQueries;
    const auto from = [&](int64_t p) { return p + 1 > job.window ? p + 1 - job.window : 0; };
    const int64_t first_block = from(position) / kKeyBlock, last_block = (last + kKeyBlock - 1) / kKeyBlock;
    const int64_t head_offset = kv * group * job.head_dimension, row_bytes = job.cache.row_bytes;
    const uint8_t* const keys = job.keys + kv * job.capacity * row_bytes;
    const uint8_t* const values = job.values + kv * job.capacity * row_bytes;
    float* const tile = scratch;
    float* const sums = tile + kKeyBlock * padded_dimension; // [head][query][dimension]
    float* const scores = sums + group * kQueryBlock * padded_dimension;
    const auto head_sums = [&](int64_t head) { return sums + head * kQueryBlock * padded_dimension; };
    const auto head_scores = [&](int64_t head) { return scores + head * kQueryBlock * job.capacity; };

    const float* const query = job.query + row * job.query_stride + head_offset;
    for (int64_t p = first_block * kKeyBlock; p < last; ++p) {
        decode_row<V>(keys + p * row_bytes, job.cache, tile);
        for (int64_t head = 0; head < group; ++head) {
            coded_scores<V, kQueries>(job, query + head * job.head_dimension, tile, head_scores(head) + p);
        }
    }
    for (int64_t head = 0; head < group; ++head) {
        for (int q = 0; q < kQueries; ++q) {
            softmax<V>(head_scores(head) + q * job.capacity, first_block, last_block, from(position + q),
                       position + q + 1);
        }
    }
    memset(sums, 0, static_cast<size_t>(group * kQueryBlock * padded_dimension) * sizeof *sums);
    for (int64_t p = first_block * kKeyBlock; p < last; p += kKeyBlock) {
        const int count = static_cast<int>(last - p < kKeyBlock ? last - p : kKeyBlock);
        for (int i = 0; i < count; ++i) {
            decode_row<V>(values + (p + i) * row_bytes, job.cache, tile + i * padded_dimension);
        }
        for (int64_t head = 0; head < group; ++head) {
            int start = 0;
            for (; start + 4 * V::kLanes <= padded_dimension; start += 4 * V::kLanes) {
                coded_weigh<V, kQueries, 4>(job, head_scores(head) + p, tile, count, start, head_sums(head));
            }
            for (; start < padded_dimension; start += V::kLanes) {
                coded_weigh<V, kQueries, 1>(job, head_scores(head) + p, tile, count, start, head_sums(head));
            }
        }
    }
    for (int64_t head = 0; head < group; ++head) {
        for (int q = 0; q < kQueries; ++q) {
            memcpy(job.out + (row + q) * job.out_stride + head_offset + head * job.head_dimension,
                   head_sums(head) + q * padded_dimension, static_cast<size_t>(job.head_dimension) * sizeof *sums);
        }
    }
}

template <class V> void attend_coded(const Attention& job, int64_t first, int64_t last, float* scratch) {
    for (int64_t task = first; task < last; ++task) {
        const int64_t kv = task % job.kv_heads;
        int64_t row = task / job.kv_heads * kQueryBlock;
        const int64_t end = row + kQueryBlock < job.count ? row + kQueryBlock : job.count;
        if (end - row == kQueryBlock) {
            attend_coded_queries<V, kQueryBlock>(job, row, kv, scratch);
        } else {
            for (; row < end; ++row) attend_coded_queries<V, 1>(job, row, kv, scratch);
        }
    }
}

// V with its plain vectors as V::Vectors, which the codec is written for.
template <class V, class C = typename V::Vectors>
constexpr EngineKernels kEngineKernels{
    multiply<V>,   quantize_activations<V>, normalize<V>,    rotate<V>,  swiglu<V>,       store_keys<V>, attend<V>,
    encode_row<C>, decode_row<C>,           attend_coded<C>, largest<C>, exponentials<C>, sums<C>,       places<C>};

} // namespace
} // namespace otaro
