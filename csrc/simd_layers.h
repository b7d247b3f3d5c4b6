// What a model computes besides products: norms, rotation, SwiGLU, attention, and quantising activations.
//
// Every row of activations goes through the same operations in the same order, whatever rows come with it, so a token's
// result does not depend on how many are computed at a time.
#pragma once

#include <cmath>

#include "engine_kernels.h"
#include "simd.h"

namespace otaro {
namespace {

// e^x to about 1e-7, for x up to 88; 0 below -87. Cody and Waite's reduction, then a polynomial on [-ln 2 / 2, ln 2 / 2].
template <class V> typename V::F exponential(typename V::F x) {
    using F = typename V::F;
    using I = typename V::I;
    const typename V::Mask tiny = V::less_than_zero(V::add(x, V::set1(87.0f)));
    x = V::max(V::min(x, V::set1(88.0f)), V::set1(-87.0f));
    const I whole = V::round_int(V::mul(x, V::set1(1.44269504f)));
    const F n = V::to_float(whole);
    F r = V::fma(n, V::set1(-0.693359375f), x);
    r = V::fma(n, V::set1(2.12194440e-4f), r);
    F p = V::set1(1.9875691500e-4f);
    constexpr float kSeries[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f};
    for (const float coefficient : kSeries) p = V::fma(p, r, V::set1(coefficient));
    p = V::add(V::fma(p, V::mul(r, r), r), V::set1(1.0f));
    const I power = V::shift_left(V::addi(whole, V::set1i(127)), V::count(23));
    return V::select(tiny, V::set1(0), V::mul(p, V::from_bits(power)));
}

template <class V> void normalize(const float* x, const float* weight, int64_t length, float epsilon, float* result) {
    typename V::F squares = V::set1(0);
    int64_t i = 0;
    for (; i + V::kLanes <= length; i += V::kLanes) {
        const typename V::F v = V::load(x + i);
        squares = V::fma(v, v, squares);
    }
    float sum = V::sum(squares);
    for (; i < length; ++i) sum += x[i] * x[i];
    // Squares beyond a float's range would make the row 0 and go unnoticed.
    const float factor = sum < INFINITY ? 1.0f / __builtin_sqrtf(sum / static_cast<float>(length) + epsilon) : NAN;
    for (i = 0; i < length; ++i) result[i] = weight[i] * (x[i] * factor);
}

template <class V> void rotate(float* heads, int64_t count, int dimension, const float* cosine, const float* sine) {
    const int half = dimension / 2;
    for (int64_t h = 0; h < count; ++h) {
        float* const first = heads + h * dimension;
        float* const second = first + half;
        for (int i = 0; i < half; ++i) {
            const float a = first[i], b = second[i];
            first[i] = a * cosine[i] - b * sine[i];
            second[i] = b * cosine[i] + a * sine[i];
        }
    }
}

template <class V> void swiglu(const float* gate, const float* up, int64_t length, float* result) {
    const auto lanes = [](typename V::F g, typename V::F u) {
        const typename V::F sigmoid_inverse = V::add(V::set1(1.0f), exponential<V>(V::mul(g, V::set1(-1.0f))));
        return V::mul(V::div(g, sigmoid_inverse), u);
    };
    int64_t i = 0;
    for (; i + V::kLanes <= length; i += V::kLanes) V::store(result + i, lanes(V::load(gate + i), V::load(up + i)));
    if (i < length) {
        float g[V::kLanes], u[V::kLanes], r[V::kLanes];
        const int rest = static_cast<int>(length - i);
        V::store(r, lanes(V::load(padded<float>(gate + i, rest, V::kLanes, g)),
                          V::load(padded<float>(up + i, rest, V::kLanes, u))));
        memcpy(result + i, r, static_cast<size_t>(rest) * sizeof *r);
    }
}

// kColumns of them share a scale.
template <class V, int kColumns>
void quantize_spans(const float* x, int64_t length, int mantissa, const Activations& to, int64_t row) {
    const bool fine = to.fine != nullptr;
    const float most = fine ? 127.0f * 256 : 127.0f;
    const float constant = step_constant(mantissa), bias = nested_bias(mantissa);
    for (int64_t span = 0; span < to.spans; ++span) {
        float buffer[kColumns];
        const int64_t start = span * kColumns, rest = length - start;
        const int count = static_cast<int>(rest < 0 ? 0 : rest < kColumns ? rest : kColumns);
        const float* const values = count == kColumns ? x + start : padded(x + start, count, kColumns, buffer);
        // Floats that are not negative are ordered as their bits are, infinity and what is not a number at the end.
        typename V::I largest = V::set1i(0);
        for (int i = 0; i < kColumns; i += V::kLanes) {
            largest = V::maxi(largest, V::bits(V::abs(V::load(values + i))));
        }
        const auto [inverse, unit] = activation_unit(bits_float(static_cast<uint32_t>(V::largest(largest))), most);
        typename V::I whole[kColumns / V::kLanes], sum = V::set1i(0);
        for (int i = 0; i < kColumns / V::kLanes; ++i) {
            whole[i] = V::round_int(V::mul(V::load(values + i * V::kLanes), V::set1(inverse)));
            sum = V::addi(sum, whole[i]);
        }
        for (int i = 0; i < kColumns / V::kLanes; ++i) {
            const int64_t place = activation_place(to, row, start + i * V::kLanes);
            if (fine) {
                V::store_low(to.coarse + place, V::shift_right(V::addi(whole[i], V::set1i(128)), V::count(8)));
                V::store_low(to.fine + place, whole[i]);
                if constexpr (V::kWords) V::store_words(to.words + place, whole[i]);
            } else {
                V::store_low(to.coarse + place, whole[i]);
            }
        }
        to.scale[row * to.stride + span] = unit * constant;
        to.offset[row * to.stride + span] = unit * constant * (bias * static_cast<float>(V::sum(sum)));
    }
}

template <class V>
void quantize_activations(const float* x, int64_t length, int mantissa, const Activations& to, int64_t row) {
    if (to.span_blocks == 1) {
        quantize_spans<V, kBlockColumns>(x, length, mantissa, to, row);
    } else {
        quantize_spans<V, kMostSpan * kBlockColumns>(x, length, mantissa, to, row);
    }
}

// ---- attention ------------------------------------------------------------------------------------------------------

template <class V>
void store_keys(const float* key, const float* value, int dimension, int padded_dimension, int64_t position, Half* keys,
                Half* values) {
    Half* const to_keys = keys + position / kKeyBlock * kKeyBlock * padded_dimension + position % kKeyBlock;
    Half* const to_values = values + position * padded_dimension;
    for (int start = 0; start < padded_dimension; start += V::kLanes) {
        const int rest = dimension - start < 0 ? 0 : dimension - start < V::kLanes ? dimension - start : V::kLanes;
        float buffer[V::kLanes];
        Half narrow[V::kLanes];
        V::store(narrow, V::load(padded<float>(key + start, rest, V::kLanes, buffer)));
        for (int i = 0; i < V::kLanes; ++i) to_keys[static_cast<int64_t>(start + i) * kKeyBlock] = narrow[i];
        V::store(to_values + start, V::load(padded<float>(value + start, rest, V::kLanes, buffer)));
    }
}

// Queries that share one reading of keys and values: rows of one head, or heads of one row.
struct Queries {
    const float* query; // `query_stride` from one to the next
    int64_t query_stride;
    float* out;
    int64_t out_stride;
    int64_t position; // of the first
    int64_t step;     // positions from one to the next
};

// Scores of kQueries queries against kBlocks key blocks from `block` on, 16 positions each: that many sums run side by side.
template <class V, int kQueries, int kBlocks>
void score(const Attention& job, const Queries& queries, const Half* keys, int64_t block, float* scores) {
    const int64_t block_size = static_cast<int64_t>(kKeyBlock) * job.padded_dimension;
    const Half* const key = keys + block * block_size;
    for (int part = 0; part < kKeyBlock; part += V::kLanes) {
        typename V::F sum[kQueries][kBlocks];
        for (int q = 0; q < kQueries; ++q) {
            for (int b = 0; b < kBlocks; ++b) sum[q][b] = V::set1(0);
        }
        for (int d = 0; d < job.head_dimension; ++d) {
            typename V::F k[kBlocks];
            for (int b = 0; b < kBlocks; ++b) k[b] = V::load(key + b * block_size + d * kKeyBlock + part);
            for (int q = 0; q < kQueries; ++q) {
                const typename V::F value = V::set1(queries.query[q * queries.query_stride + d]);
                for (int b = 0; b < kBlocks; ++b) sum[q][b] = V::fma(value, k[b], sum[q][b]);
            }
        }
        for (int q = 0; q < kQueries; ++q) {
            float* const to = scores + q * job.capacity + block * kKeyBlock + part;
            for (int b = 0; b < kBlocks; ++b) V::store(to + b * kKeyBlock, V::mul(sum[q][b], V::set1(job.scale)));
        }
    }
}

// Scores in whole blocks to weights that sum to one; those outside [first, last) become 0.
template <class V> void softmax(float* scores, int64_t first_block, int64_t last_block, int64_t first, int64_t last) {
    for (int64_t i = first_block * kKeyBlock; i < first; ++i) scores[i] = -INFINITY;
    for (int64_t i = last; i < last_block * kKeyBlock; ++i) scores[i] = -INFINITY;
    const int64_t start = first_block * kKeyBlock, end = last_block * kKeyBlock;
    typename V::F most = V::set1(-INFINITY);
    for (int64_t i = start; i < end; i += V::kLanes) most = V::max(most, V::load(scores + i));
    float lanes[V::kLanes];
    V::store(lanes, most);
    float largest = lanes[0];
    for (int i = 1; i < V::kLanes; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    typename V::F sum = V::set1(0);
    for (int64_t i = start; i < end; i += V::kLanes) {
        const typename V::F e = exponential<V>(V::add(V::load(scores + i), V::set1(-largest)));
        V::store(scores + i, e);
        sum = V::add(sum, e);
    }
    const typename V::F inverse = V::set1(1.0f / V::sum(sum));
    for (int64_t i = start; i < end; i += V::kLanes) V::store(scores + i, V::mul(V::load(scores + i), inverse));
}

// The values of positions [first, last) weighted by the scores, kVectors vectors of a head's dimensions from `start` on.
template <class V, int kQueries, int kVectors>
void weigh(const Attention& job, const Queries& queries, const float* scores, const Half* values, int64_t first,
           int64_t last, int start) {
    typename V::F sum[kQueries][kVectors];
    for (int q = 0; q < kQueries; ++q) {
        for (int v = 0; v < kVectors; ++v) sum[q][v] = V::set1(0);
    }
    for (int64_t position = first; position < last; ++position) {
        const Half* const value = values + position * job.padded_dimension + start;
        typename V::F vectors[kVectors];
        for (int v = 0; v < kVectors; ++v) vectors[v] = V::load(value + v * V::kLanes);
        for (int q = 0; q < kQueries; ++q) {
            const typename V::F weight = V::set1(scores[q * job.capacity + position]);
            for (int v = 0; v < kVectors; ++v) sum[q][v] = V::fma(weight, vectors[v], sum[q][v]);
        }
    }
    for (int q = 0; q < kQueries; ++q) {
        float lanes[kVectors * V::kLanes];
        for (int v = 0; v < kVectors; ++v) V::store(lanes + v * V::kLanes, sum[q][v]);
        const int rest = job.head_dimension - start;
        const int count = rest < kVectors * V::kLanes ? rest : kVectors * V::kLanes;
        if (count > 0) {
            memcpy(queries.out + q * queries.out_stride + start, lanes, static_cast<size_t>(count) * sizeof *lanes);
        }
    }
}

template <class V, int kQueries>
void attend_queries(const Attention& job, const Queries& queries, int64_t kv_head, float* scores) {
    const int64_t kv_offset = kv_head * job.capacity * job.padded_dimension;
    const int64_t last = queries.position + (kQueries - 1) * queries.step + 1;
    const auto from = [&](int64_t p) { return p + 1 > job.window ? p + 1 - job.window : 0; };
    const int64_t first_block = from(queries.position) / kKeyBlock, last_block = (last + kKeyBlock - 1) / kKeyBlock;
    const Half* const keys = reinterpret_cast<const Half*>(job.keys) + kv_offset;
    const Half* const values = reinterpret_cast<const Half*>(job.values) + kv_offset;
    const int64_t first = first_block * kKeyBlock;
    if (queries.step == 0) { // one row: both are read once, the values while scores are computed
        for (int64_t i = first * job.padded_dimension; i < last * job.padded_dimension; i += 32) {
            V::prefetch(reinterpret_cast<const uint8_t*>(values + i));
        }
    }
    constexpr int kBlocks = kQueries == 1 ? 4 : kQueries == 4 ? 1 : 2; // sums enough to hide the latency of an addition
    int64_t block = first_block;
    for (; block + kBlocks <= last_block; block += kBlocks) {
        score<V, kQueries, kBlocks>(job, queries, keys, block, scores);
    }
    for (; block < last_block; ++block) score<V, kQueries, 1>(job, queries, keys, block, scores);
    for (int q = 0; q < kQueries; ++q) {
        const int64_t position = queries.position + q * queries.step;
        softmax<V>(scores + q * job.capacity, first_block, last_block, from(position), position + 1);
    }
    int start = 0;
    for (; start + 4 * V::kLanes <= job.padded_dimension; start += 4 * V::kLanes) {
        weigh<V, kQueries, 4>(job, queries, scores, values, first, last, start);
    }
    for (; start < job.padded_dimension; start += V::kLanes) {
        weigh<V, kQueries, 1>(job, queries, scores, values, first, last, start);
    }
}

template <class V> void attend(const Attention& job, int64_t first, int64_t last, float* scratch) {
    const int64_t sharing = job.heads / job.kv_heads, parts = head_parts(job), dimension = job.head_dimension;
    for (int64_t task = first; task < last; ++task) {
        const int64_t part = task % parts, kv_head = task / parts % job.kv_heads;
        const int64_t begin = task / parts / job.kv_heads * kQueryBlock;
        const int64_t end = begin + kQueryBlock < job.count ? begin + kQueryBlock : job.count;
        const int64_t first_head = kv_head * sharing + part * kQueryBlock;
        const int64_t heads = sharing - part * kQueryBlock < kQueryBlock ? sharing - part * kQueryBlock : kQueryBlock;
        const auto run = [&](auto count, int64_t row, int64_t head, bool rows) {
            const int64_t query = row * job.query_stride + head * dimension,
                          out = row * job.out_stride + head * dimension;
            const Queries queries{job.query + query,  rows ? job.query_stride : dimension,
                                  job.out + out,      rows ? job.out_stride : dimension,
                                  job.position + row, rows ? 1 : 0};
            attend_queries<V, decltype(count)::value>(job, queries, kv_head, scratch);
        };
        if (end - begin == kQueryBlock) { // rows of one head after another
            for (int64_t head = 0; head < heads; ++head) run(Number<kQueryBlock>(), begin, first_head + head, true);
            continue;
        }
        for (int64_t row = begin; row < end; ++row) { // few rows: all heads of each
            if (heads == 4) run(Number<4>(), row, first_head, false);
            if (heads == 3) run(Number<3>(), row, first_head, false);
            if (heads == 2) run(Number<2>(), row, first_head, false);
            if (heads == 1) run(Number<1>(), row, first_head, false);
        }
    }
}

} // namespace
} // namespace otaro
