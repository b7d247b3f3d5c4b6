// What picking a token does with all logits of a row. Sums are taken in 16 lanes of a block, whatever the vectors, so that
// every instruction set gives the same bits.
#pragma once

#include "engine_kernels.h"
#include "simd_layers.h"

namespace otaro {
namespace {

template <class V> bool largest(const float* x, int64_t length, int64_t* place) {
    constexpr uint32_t kInfinity = 0x7f800000;
    int64_t best_start = 0;
    float best = -INFINITY;
    for (int64_t start = 0; start < length; start += kSumBlock) {
        const int64_t end = length - start < kSumBlock ? length : start + kSumBlock;
        typename V::F most = V::set1(-INFINITY);
        typename V::I extent = V::set1i(0);
        int64_t i = start;
        for (; i + V::kLanes <= end; i += V::kLanes) {
            const typename V::F value = V::load(x + i);
            most = V::max(most, value);
            extent = V::maxi(extent, V::bits(V::abs(value)));
        }
        uint32_t widest = static_cast<uint32_t>(V::largest(extent));
        float lanes[V::kLanes], found = -INFINITY;
        V::store(lanes, most);
        for (const float lane : lanes) found = lane > found ? lane : found;
        for (; i < end; ++i) {
            found = x[i] > found ? x[i] : found;
            const uint32_t bits = float_bits(std::fabs(x[i]));
            widest = bits > widest ? bits : widest;
        }
        if (widest >= kInfinity) return false;
        if (found > best) {
            best = found;
            best_start = start;
        }
    }
    *place = best_start;
    while (x[*place] != best) ++*place;
    return true;
}

// The sum of a block of value(vector), at most kSumBlock of them and a multiple of 16.
template <class V, class Value> double block_sum(const float* x, int64_t length, const Value& value) {
    constexpr int kVectors = kSumLanes / V::kLanes;
    typename V::F sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = V::set1(0);
    for (int64_t i = 0; i < length; i += kSumLanes) {
        for (int v = 0; v < kVectors; ++v) {
            sum[v] = V::add(sum[v], value(i + v * V::kLanes, V::load(x + i + v * V::kLanes)));
        }
    }
    float lanes[kSumLanes];
    for (int v = 0; v < kVectors; ++v) V::store(lanes + v * V::kLanes, sum[v]);
    double total = 0;
    for (const float lane : lanes) total += static_cast<double>(lane);
    return total;
}

template <class V> double exponentials(const float* x, int64_t length, float most, float scale, float* result) {
    double sum = 0;
    for (int64_t start = 0; start < length; start += kSumBlock) {
        const int64_t count = length - start < kSumBlock ? length - start : kSumBlock;
        sum += block_sum<V>(x + start, count, [&](int64_t i, typename V::F value) {
            const typename V::F e = exponential<V>(V::mul(V::add(value, V::set1(-most)), V::set1(scale)));
            V::store(result + start + i, e);
            return e;
        });
    }
    return sum;
}

template <class V> void sums(const float* x, int64_t length, float least, float* sums) {
    for (int64_t start = 0; start < length; start += kSumBlock) {
        const int64_t count = length - start < kSumBlock ? length - start : kSumBlock;
        const auto kept = [&](int64_t, typename V::F value) {
            return V::select(V::less_than_zero(V::add(value, V::set1(-least))), V::set1(0), value);
        };
        *sums++ = static_cast<float>(block_sum<V>(x + start, count, kept));
    }
}

template <class V>
int64_t places(const float* x, int64_t length, float low, float high, int64_t most, int32_t* result) {
    int64_t i = 0, count = 0;
    for (; i + V::kLanes <= length && count <= most; i += V::kLanes) {
        const typename V::F value = V::load(x + i);
        const uint32_t below = V::lanes(V::less_than_zero(V::add(value, V::set1(-high))));
        uint32_t left = below & ~V::lanes(V::less_than_zero(V::add(value, V::set1(-low))));
        for (; left != 0; left &= left - 1) result[count++] = static_cast<int32_t>(i + __builtin_ctz(left));
    }
    for (; i < length && count <= most; ++i) {
        if (x[i] >= low && x[i] < high) result[count++] = static_cast<int32_t>(i);
    }
    return count;
}

} // namespace
} // namespace otaro
