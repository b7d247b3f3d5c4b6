// The reference: plain C++, one weight at a time, in the order the format's definition gives. Every SIMD version must
// produce the same bits; machines without any of them run this one.

#include <cmath>

#include "format.h"
#include "kernels.h"
#include "nested_ref.h"

namespace otaro {
namespace {

// ---- weights to codes -----------------------------------------------------------------------------------------------

// The code nearest to `code` in the cell of `narrower`: alike but for the bits dropped from the right.
int within_ref(int code, int narrower, int dropped) {
    const int last = narrower | ((1 << dropped) - 1), first = last - ((1 << dropped) - 1);
    return code < first ? first : code > last ? last : code;
}

int code_ref(float weight, int scale, int mantissa, int scheme) {
    if (scheme == OTARO_NESTED) return nested_code_ref(weight, scale) >> (kWidest - mantissa);
    const int limit = (1 << mantissa) - 1;
    const float scaled = std::fabs(weight) * inverse_step(scale, mantissa);
    const float clamped = scaled < static_cast<float>(limit) ? scaled : static_cast<float>(limit);
    const float magnitude = scheme == OTARO_TRUNCATE ? std::floor(clamped) : std::nearbyint(clamped);
    return static_cast<int>(magnitude) | (weight < 0 ? 1 << mantissa : 0);
}

// Reads a group as float32, filled with zeros, and returns the bits of its largest magnitude.
uint32_t load_group_ref(const void* weight, int dtype, int64_t offset, int weights, int size, float* group) {
    uint32_t largest = 0;
    with_dtype(dtype, [&](auto type) {
        const auto* const from = static_cast<const typename decltype(type)::type*>(weight) + offset;
        for (int i = 0; i < size; ++i) {
            group[i] = i < weights ? to_float(from[i]) : 0;
            const uint32_t magnitude = float_bits(group[i]) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
    });
    return largest;
}

// Visits groups [first, last) of weights: body(group's number, offset, weights in it, their floats filled up to a whole
// group, scale). Stops at a weight that is not finite where `findings` asks to know.
template <class Body>
void for_weights_ref(const Weights& from, int64_t first, int64_t last, Findings* findings, const Body& body) {
    for_groups(from.geometry, first, last, [&](int64_t group, int64_t offset, int weights) {
        float buffer[kMaxGroup];
        const uint32_t largest =
            load_group_ref(from.weight, from.dtype, offset, weights, from.geometry.group_size, buffer);
        if (findings != nullptr && largest >= kInfinityBits) {
            findings->not_finite = offset + first_not_finite(buffer);
            return false;
        }
        const uint8_t scale =
            from.scale != nullptr ? from.scale[group] : scale_ref(buffer, weights, from.format.scheme, largest);
        if (findings != nullptr) {
            findings->below += scale != 0 && exponent_below(largest);
            findings->above += exponent_above(largest);
        }
        body(group, offset, weights, buffer, scale);
        return true;
    });
}

void scales_ref(const ScalesJob& job, int64_t first, int64_t last) {
    for_weights_ref(job.from, first, last, nullptr,
                    [&](int64_t group, int64_t, int, const float*, uint8_t scale) { job.scale[group] = scale; });
}

void encode_ref(const EncodeJob& job, int64_t first, int64_t last, Findings& findings) {
    const auto body = [&](int64_t group, int64_t offset, int weights, const float* values, uint8_t scale) {
        job.codes.scale[group] = scale;
        for (int i = 0; i < weights; ++i) {
            const int code = code_ref(values[i], scale, job.mantissa, job.from.format.scheme);
            job.codes.code[offset + i] = static_cast<int16_t>(code);
        }
    };
    for_weights_ref(job.from, first, last, &findings, body);
}

void pack_ref(const PackJob& job, int64_t first, int64_t last, Findings& findings) {
    const int size = job.from.geometry.group_size;
    const otaro_planes& planes = job.planes;
    const auto body = [&](int64_t group, int64_t, int, const float* values, uint8_t scale) {
        planes.scale[group] = scale;
        for (int i = 0; i < size; i += 8) {
            unsigned plane[OTARO_BIT_PLANES] = {}, nibbles = 0;
            for (int j = 0; j < 8; ++j) {
                const unsigned bits =
                    static_cast<unsigned>(code_ref(values[i + j], scale, kWidest, job.from.format.scheme));
                nibbles |= bits >> OTARO_BIT_PLANES << (4 * j);
                for (int p = 0; p < OTARO_BIT_PLANES; ++p) plane[p] |= (bits >> (OTARO_BIT_PLANES - 1 - p) & 1) << j;
            }
            for (int j = 0; j < 4; ++j) {
                planes.base[(group * size + i) / 2 + j] = static_cast<uint8_t>(nibbles >> (8 * j));
            }
            for (int64_t p = 0; p < planes.bits_count; ++p) {
                planes.bits[p][(group * size + i) / 8] = static_cast<uint8_t>(plane[p]);
            }
        }
    };
    for_weights_ref(job.from, first, last, &findings, body);
}

// ---- codes to values ------------------------------------------------------------------------------------------------

int truncate_code_ref(int code, int scheme, int from, int to) {
    const int dropped = from - to;
    if (scheme != OTARO_NEAREST || dropped == 0) return code >> dropped;
    const int limit = (1 << to) - 1;
    const int magnitude = ((code & ((1 << from) - 1)) + (1 << (dropped - 1))) >> dropped;
    return (code >> from) * (1 << to) | (magnitude < limit ? magnitude : limit);
}

float value_ref(int code, int scheme, int mantissa, float step) {
    if (scheme == OTARO_NESTED) return (static_cast<float>(code) + nested_bias(mantissa)) * step;
    const float value = static_cast<float>(code & ((1 << mantissa) - 1)) * step;
    return code >> mantissa != 0 ? -value : value;
}

void store_ref(void* values, int dtype, int64_t index, float value) {
    with_dtype(dtype,
               [&](auto type) { from_float(value, static_cast<typename decltype(type)::type*>(values)[index]); });
}

void decode_ref(const DecodeJob& job, int64_t first, int64_t last) {
    for_groups(job.geometry, first, last, [&](int64_t group, int64_t offset, int weights) {
        const float size = step(job.codes.scale[group], job.mantissa);
        for (int64_t i = offset; i < offset + weights; ++i) {
            store_ref(job.value, job.dtype, i, value_ref(job.codes.code[i], job.format.scheme, job.mantissa, size));
        }
        return true;
    });
}

void truncate_ref(const TruncateJob& job, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
        job.result[i] = static_cast<int16_t>(truncate_code_ref(job.code[i], job.scheme, job.from, job.to));
    }
}

void quantize_ref(const QuantizeJob& job, int64_t first, int64_t last) {
    const Weights& from = job.from;
    const Deciding& deciding = job.deciding;
    const bool tiered = deciding.count > 1 || deciding.weight[0] != from.weight;
    const auto body = [&](int64_t, int64_t offset, int weights, const float* values, uint8_t scale) {
        const float size = step(scale, job.mantissa);
        int codes[kMaxGroup];
        for (int t = 0; tiered && t < deciding.count; ++t) {
            float tier[kMaxGroup];
            load_group_ref(deciding.weight[t], from.dtype, offset, weights, from.geometry.group_size, tier);
            for (int i = 0; i < weights; ++i) {
                const int code = nested_code_ref(tier[i], scale);
                codes[i] = t == 0 ? code : within_ref(code, codes[i], kWidest - deciding.mantissa[t - 1]);
            }
        }
        for (int i = 0; i < weights; ++i) {
            const int code = tiered ? codes[i] >> (kWidest - job.mantissa)
                                    : code_ref(values[i], scale, job.mantissa, from.format.scheme);
            store_ref(job.value, from.dtype, offset + i, value_ref(code, from.format.scheme, job.mantissa, size));
        }
    };
    for_weights_ref(from, first, last, nullptr, body);
}

// One weight of a packed tensor; `position` counts through padded rows.
float plane_value_ref(const PlanesJob& job, int64_t position) {
    const int stored = stored_mantissa(job.format.scheme, job.mantissa);
    int code = job.planes.base[position / 2] >> (4 * (position & 1)) & 15;
    for (int p = 0; p < stored - kNarrowest; ++p) code = code << 1 | plane_bit(job.planes.bits[p], position);
    code = truncate_code_ref(code, job.format.scheme, stored, job.mantissa);
    const float size = step(job.planes.scale[position / job.geometry.group_size], job.mantissa);
    return value_ref(code, job.format.scheme, job.mantissa, size);
}

void dequantize_ref(const PlanesJob& job, int64_t first, int64_t last, void* value) {
    int64_t index = 0;
    for_groups(job.geometry, first, last, [&](int64_t group, int64_t, int weights) {
        for (int i = 0; i < weights; ++i) {
            store_ref(value, job.dtype, index++, plane_value_ref(job, group * job.geometry.group_size + i));
        }
        return true;
    });
}

void linear_ref(const LinearJob& job, int64_t first, int64_t last) {
    const PlanesJob& weight = job.weight;
    const Geometry& geometry = weight.geometry;
    for (int64_t row = first; row < last; ++row) {
        for (int64_t b = 0; b < job.batch; ++b) job.y[b * geometry.rows + row] = job.bias ? job.bias[row] : 0;
        for_groups(geometry, row * geometry.groups, (row + 1) * geometry.groups,
                   [&](int64_t group, int64_t offset, int weights) {
                       float buffer[kMaxGroup];
                       for (int i = 0; i < weights; ++i) {
                           buffer[i] = plane_value_ref(weight, group * geometry.group_size + i);
                       }
                       for (int64_t b = 0; b < job.batch; ++b) {
                           const float* x = job.x + b * geometry.columns + (offset - row * geometry.columns);
                           float sum = 0;
                           for (int i = 0; i < weights; ++i) sum += buffer[i] * x[i];
                           job.y[b * geometry.rows + row] += sum;
                       }
                       return true;
                   });
    }
}

constexpr Kernels kTable{scales_ref, encode_ref,   pack_ref,       quantize_ref,
                         decode_ref, truncate_ref, dequantize_ref, linear_ref};

} // namespace

const Kernels* const kernels_ref = &kTable;

} // namespace otaro
