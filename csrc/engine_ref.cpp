// The engine in plain C++: what the vector versions are tested against, and what runs where there are none.

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine_kernels.h"
#include "nested_ref.h"

namespace otaro {
namespace {

void multiply_ref(const Product& product, int64_t first, int64_t last, uint8_t*) {
    const Tiles& tiles = *product.weight;
    const Activations& x = *product.x;
    const bool fine = x.fine != nullptr;
    const int columns = x.span_blocks * kBlockColumns;
    const int64_t end = last * kTileRows < tiles.rows ? last * kTileRows : tiles.rows;
    for (int64_t row = first * kTileRows; row < end; ++row) {
        for (int64_t b = 0; b < product.batch; ++b) {
            float sum = 0;
            for (int64_t span = 0; span < x.spans; ++span) {
                int32_t total = 0;
                for (int64_t k = span * columns; k < (span + 1) * columns; ++k) {
                    const int64_t place = activation_place(x, b, k);
                    int32_t activation = x.coarse[place];
                    if (fine) activation = 256 * activation + x.fine[place];
                    total += tile_code(tiles, row, k, product.mantissa) * activation;
                }
                const float scale = scale_float(tile_scale(tiles, row, span * columns));
                const int64_t entry = b * x.stride + span;
                sum = std::fma(scale, std::fma(static_cast<float>(total), x.scale[entry], x.offset[entry]), sum);
            }
            if (product.bias != nullptr) sum += product.bias[row];
            float& y = product.y[b * product.y_stride + row];
            y = product.add ? y + sum : sum;
        }
    }
}

void quantize_ref(const float* x, int64_t length, int mantissa, const Activations& to, int64_t row) {
    const bool fine = to.fine != nullptr;
    const float most = fine ? 127.0f * 256 : 127.0f;
    const int columns = to.span_blocks * kBlockColumns;
    for (int64_t span = 0; span < to.spans; ++span) {
        const int64_t start = span * columns;
        const auto value = [&](int64_t i) { return start + i < length ? x[start + i] : 0.0f; };
        uint32_t largest = 0;
        for (int i = 0; i < columns; ++i) largest = std::max(largest, float_bits(std::fabs(value(i))));
        const auto [inverse, unit] = activation_unit(bits_float(largest), most);
        int32_t sum = 0;
        for (int i = 0; i < columns; ++i) {
            const int64_t place = activation_place(to, row, start + i);
            const float scaled = value(i) * inverse;
            const int32_t whole = std::isfinite(scaled) ? static_cast<int32_t>(std::nearbyint(scaled)) : 0;
            sum += whole;
            if (fine) {
                const int32_t top = (whole + 128) >> 8;
                to.coarse[place] = static_cast<int8_t>(top);
                to.fine[place] = static_cast<int8_t>(whole - top * 256);
            } else {
                to.coarse[place] = static_cast<int8_t>(whole);
            }
        }
        const float scale = unit * step_constant(mantissa);
        to.scale[row * to.stride + span] = scale;
        to.offset[row * to.stride + span] = scale * (nested_bias(mantissa) * static_cast<float>(sum));
    }
}

void normalize_ref(const float* x, const float* weight, int64_t length, float epsilon, float* result) {
    double squares = 0;
    for (int64_t i = 0; i < length; ++i) squares += static_cast<double>(x[i]) * x[i];
    const float factor = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(length) + epsilon));
    for (int64_t i = 0; i < length; ++i) result[i] = weight[i] * (x[i] * factor);
}

void rotate_ref(float* heads, int64_t count, int dimension, const float* cosine, const float* sine) {
    const int half = dimension / 2;
    for (int64_t h = 0; h < count; ++h) {
        float* const head = heads + h * dimension;
        for (int i = 0; i < half; ++i) {
            const float a = head[i], b = head[i + half];
            head[i] = a * cosine[i] - b * sine[i];
            head[i + half] = b * cosine[i] + a * sine[i];
        }
    }
}

void swiglu_ref(const float* gate, const float* up, int64_t length, float* result) {
    for (int64_t i = 0; i < length; ++i) result[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

void store_keys_ref(const float* key, const float* value, int dimension, int padded, int64_t position, Half* keys,
                    Half* values) {
    for (int d = 0; d < padded; ++d) {
        const int64_t place = position / kKeyBlock * kKeyBlock * padded + int64_t{d} * kKeyBlock + position % kKeyBlock;
        from_float(d < dimension ? key[d] : 0.0f, keys[place]);
        from_float(d < dimension ? value[d] : 0.0f, values[position * padded + d]);
    }
}

// A position's key or value as floats.
using ReadRow = void (*)(const Attention& job, int64_t kv, int64_t position, float* row);

void half_key_ref(const Attention& job, int64_t kv, int64_t position, float* row) {
    const Half* const keys = reinterpret_cast<const Half*>(job.keys) + kv * job.capacity * job.padded_dimension;
    const Half* const key = keys + position / kKeyBlock * kKeyBlock * job.padded_dimension + position % kKeyBlock;
    for (int d = 0; d < job.head_dimension; ++d) row[d] = to_float(key[int64_t{d} * kKeyBlock]);
}

void half_value_ref(const Attention& job, int64_t kv, int64_t position, float* row) {
    const Half* const values = reinterpret_cast<const Half*>(job.values);
    const Half* const value = values + (kv * job.capacity + position) * job.padded_dimension;
    for (int d = 0; d < job.head_dimension; ++d) row[d] = to_float(value[d]);
}

void encode_row_ref(const float* x, const Cache& cache, uint8_t* row) {
    const int64_t block_bytes = cache_block_bytes(cache.mantissa);
    memset(row, 0, static_cast<size_t>(cache.row_bytes));
    uint8_t* const scales = row + cache.padded_dimension / kBlock * block_bytes;
    for (int start = 0; start < cache.padded_dimension; start += kCacheGroup) {
        const int count = std::min(kCacheGroup, cache.dimension - start);
        const int end = std::min(start + kCacheGroup, cache.padded_dimension);
        float values[kCacheGroup] = {};
        uint32_t largest = 0;
        for (int i = 0; i < count; ++i) {
            values[i] = x[start + i];
            largest = std::max(largest, float_bits(std::fabs(values[i])));
        }
        const uint8_t scale = scales[start / kCacheGroup] = scale_ref(values, count, OTARO_NESTED, largest);
        for (int d = start; d < end; ++d) {
            const int code = nested_code_ref(values[d - start], scale), place = d % kBlock;
            uint8_t* const block = row + d / kBlock * block_bytes;
            block[place / 2] |= static_cast<uint8_t>(code >> OTARO_BIT_PLANES << (place % 2 * 4));
            for (int p = 0; p < cache.mantissa - kNarrowest; ++p) {
                const int bit = code >> (OTARO_BIT_PLANES - 1 - p) & 1;
                block[kBlock / 2 + p * kBlock / 8 + place / 8] |= static_cast<uint8_t>(bit << place % 8);
            }
        }
    }
}

void decode_row_ref(const uint8_t* row, const Cache& cache, float* x) {
    const int64_t block_bytes = cache_block_bytes(cache.mantissa);
    const uint8_t* const scales = row + cache.padded_dimension / kBlock * block_bytes;
    for (int d = 0; d < cache.padded_dimension; ++d) {
        const int place = d % kBlock;
        const uint8_t* const block = row + d / kBlock * block_bytes;
        int code = block[place / 2] >> (place % 2 * 4) & 15;
        for (int p = 0; p < cache.mantissa - kNarrowest; ++p) {
            code = code << 1 | plane_bit(block + kBlock / 2 + p * kBlock / 8, place);
        }
        const float size = step(scales[d / kCacheGroup], cache.mantissa);
        x[d] = (static_cast<float>(code) + nested_bias(cache.mantissa)) * size;
    }
}

void coded_key_ref(const Attention& job, int64_t kv, int64_t position, float* row) {
    decode_row_ref(job.keys + (kv * job.capacity + position) * job.cache.row_bytes, job.cache, row);
}

void coded_value_ref(const Attention& job, int64_t kv, int64_t position, float* row) {
    decode_row_ref(job.values + (kv * job.capacity + position) * job.cache.row_bytes, job.cache, row);
}

void attend_head_ref(const Attention& job, int64_t row, int64_t head, ReadRow key, ReadRow value, float* scores) {
    const float* const query = job.query + row * job.query_stride + head * job.head_dimension;
    float* const out = job.out + row * job.out_stride + head * job.head_dimension;
    const int64_t kv = head / (job.heads / job.kv_heads);
    const int64_t position = job.position + row, from = position + 1 > job.window ? position + 1 - job.window : 0;
    float buffer[kMostHeadDimension];
    float largest = -INFINITY, sum = 0;
    for (int64_t p = from; p <= position; ++p) {
        key(job, kv, p, buffer);
        float score = 0;
        for (int d = 0; d < job.head_dimension; ++d) score += query[d] * buffer[d];
        scores[p] = score * job.scale;
        largest = std::fmax(largest, scores[p]);
    }
    for (int64_t p = from; p <= position; ++p) sum += scores[p] = std::exp(scores[p] - largest);
    for (int d = 0; d < job.head_dimension; ++d) out[d] = 0;
    for (int64_t p = from; p <= position; ++p) {
        value(job, kv, p, buffer);
        for (int d = 0; d < job.head_dimension; ++d) out[d] += scores[p] * buffer[d];
    }
    for (int d = 0; d < job.head_dimension; ++d) out[d] /= sum;
}

void attend_tasks_ref(const Attention& job, int64_t first, int64_t last, ReadRow key, ReadRow value, float* scratch) {
    const int64_t sharing = job.heads / job.kv_heads, parts = head_parts(job), size = parts > 1 ? kQueryBlock : sharing;
    for (int64_t task = first; task < last; ++task) {
        const int64_t kv_head = task / parts % job.kv_heads, begin = task / parts / job.kv_heads * kQueryBlock;
        const int64_t head = kv_head * sharing + task % parts * size;
        for (int64_t row = begin; row < std::min(begin + kQueryBlock, job.count); ++row) {
            for (int64_t i = head; i < std::min(head + size, (kv_head + 1) * sharing); ++i) {
                attend_head_ref(job, row, i, key, value, scratch);
            }
        }
    }
}

void attend_ref(const Attention& job, int64_t first, int64_t last, float* scratch) {
    attend_tasks_ref(job, first, last, half_key_ref, half_value_ref, scratch);
}

void attend_coded_ref(const Attention& job, int64_t first, int64_t last, float* scratch) {
    attend_tasks_ref(job, first, last, coded_key_ref, coded_value_ref, scratch);
}

// ---- picking tokens, to the bits of simd_sampling.h -----------------------------------------------------------------------

bool largest_ref(const float* x, int64_t length, int64_t* place) {
    *place = 0;
    for (int64_t i = 0; i < length; ++i) {
        if (!std::isfinite(x[i])) return false;
        if (x[i] > x[*place]) *place = i;
    }
    return true;
}

float exponential_ref(float x) {
    if (x + 87.0f < 0) return 0;
    x = std::max(std::min(x, 88.0f), -87.0f);
    const float n = std::nearbyint(x * 1.44269504f);
    float r = std::fma(n, -0.693359375f, x);
    r = std::fma(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    constexpr float kSeries[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f};
    for (const float coefficient : kSeries) p = std::fma(p, r, coefficient);
    p = std::fma(p, r * r, r) + 1.0f;
    return p * bits_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}

template <class Value> double block_sum_ref(const float* x, int64_t length, const Value& value) {
    float lanes[kSumLanes] = {};
    for (int64_t i = 0; i < length; ++i) lanes[i % kSumLanes] += value(x[i]);
    double sum = 0;
    for (const float lane : lanes) sum += static_cast<double>(lane);
    return sum;
}

double exponentials_ref(const float* x, int64_t length, float most, float scale, float* result) {
    double sum = 0;
    for (int64_t i = 0; i < length; ++i) result[i] = exponential_ref((x[i] + -most) * scale);
    for (int64_t start = 0; start < length; start += kSumBlock) {
        sum += block_sum_ref(result + start, std::min(kSumBlock, length - start), [](float value) { return value; });
    }
    return sum;
}

void sums_ref(const float* x, int64_t length, float least, float* sums) {
    const auto kept = [&](float value) { return value < least ? 0.0f : value; };
    for (int64_t start = 0; start < length; start += kSumBlock) {
        *sums++ = static_cast<float>(block_sum_ref(x + start, std::min(kSumBlock, length - start), kept));
    }
}

int64_t places_ref(const float* x, int64_t length, float low, float high, int64_t most, int32_t* result) {
    int64_t count = 0;
    for (int64_t i = 0; i < length && count <= most; ++i) {
        if (x[i] >= low && x[i] < high) result[count++] = static_cast<int32_t>(i);
    }
    return count;
}

constexpr EngineKernels kTable{multiply_ref,   quantize_ref,     normalize_ref,  rotate_ref,     swiglu_ref,
                               store_keys_ref, attend_ref,       encode_row_ref, decode_row_ref, attend_coded_ref,
                               largest_ref,    exponentials_ref, sums_ref,       places_ref};

} // namespace

const EngineKernels* const engine_kernels_ref = &kTable;

} // namespace otaro
