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

int code_ref(float weight, int field, int mantissa, const otaro_format& format) {
    if (format.scheme == OTARO_NESTED) {
        return nested_code_ref(weight, field, format.polarity != 0) >> (kWidest - mantissa);
    }
    const int limit = (1 << mantissa) - 1;
    const float scaled = std::fabs(weight) * inverse_step(field, mantissa);
    const float clamped = scaled < static_cast<float>(limit) ? scaled : static_cast<float>(limit);
    const float magnitude = format.scheme == OTARO_TRUNCATE ? std::floor(clamped) : std::nearbyint(clamped);
    return static_cast<int>(magnitude) | (weight < 0 ? 1 << mantissa : 0);
}

// Reads a group as float32, filled with zeros, and returns the bits of its largest magnitude.
uint32_t load_group_ref(const void* weight, int dtype, int64_t offset, int weights, int size, float* group) {
    uint32_t largest = 0;
    for (int i = 0; i < size; ++i) {
        if (i >= weights) {
            group[i] = 0;
        } else if (dtype == OTARO_FLOAT32) {
            group[i] = static_cast<const float*>(weight)[offset + i];
        } else if (dtype == OTARO_FLOAT16) {
            group[i] = to_float(static_cast<const Half*>(weight)[offset + i]);
        } else {
            group[i] = to_float(static_cast<const Brain*>(weight)[offset + i]);
        }
        const uint32_t magnitude = float_bits(group[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

int64_t first_not_finite_ref(const float* group) {
    int64_t i = 0;
    while ((float_bits(group[i]) & kInfinityBits) != kInfinityBits) ++i;
    return i;
}

void encode_ref(const EncodeJob& job, int64_t first, int64_t last, Findings& findings) {
    const int size = job.geometry.group_size;
    for_groups(job.geometry, first, last, [&](int64_t group, int64_t offset, int weights) {
        float buffer[kMaxGroup];
        const uint32_t largest = load_group_ref(job.weight, job.dtype, offset, weights, size, buffer);
        if (largest >= kInfinityBits) {
            findings.not_finite = offset + first_not_finite_ref(buffer);
            return false;
        }
        const GroupCode code = prepare_group_ref(buffer, weights, job.format, largest);
        job.codes.exponent[group] = static_cast<uint8_t>(code.field);
        if (job.format.polarity != 0) job.codes.polarity[group] = code.polarity;
        for (int i = 0; i < weights; ++i) {
            job.codes.code[offset + i] =
                static_cast<int16_t>(code_ref(buffer[i], code.field, job.mantissa, job.format));
        }
        return true;
    });
}

void pack_ref(const PackJob& job, int64_t first, int64_t last, Findings& findings) {
    const int size = job.geometry.group_size;
    const otaro_planes& planes = job.planes;
    StreamWriter exponents(planes.exponent, first, kExponentBits), polarities(planes.polarity, first, 1);
    for_groups(job.geometry, first, last, [&](int64_t group, int64_t offset, int weights) {
        float buffer[kMaxGroup];
        const uint32_t largest = load_group_ref(job.weight, job.dtype, offset, weights, size, buffer);
        if (largest >= kInfinityBits) {
            findings.not_finite = offset + first_not_finite_ref(buffer);
            return false;
        }
        findings.below += exponent_below(largest);
        findings.above += exponent_above(largest);
        const GroupCode code = prepare_group_ref(buffer, weights, job.format, largest);
        exponents.put(static_cast<unsigned>(code.field));
        if (job.format.polarity != 0) polarities.put(code.polarity);
        for (int i = 0; i < size; i += 8) {
            unsigned plane[OTARO_BIT_PLANES] = {}, nibbles = 0;
            for (int j = 0; j < 8; ++j) {
                const unsigned bits = static_cast<unsigned>(code_ref(buffer[i + j], code.field, kWidest, job.format));
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
        return true;
    });
    exponents.finish();
    if (job.format.polarity != 0) polarities.finish();
}

// ---- codes to values ------------------------------------------------------------------------------------------------

int truncate_code_ref(int code, int scheme, int from, int to) {
    const int dropped = from - to;
    if (scheme != OTARO_NEAREST || dropped == 0) return code >> dropped;
    const int limit = (1 << to) - 1;
    const int magnitude = ((code & ((1 << from) - 1)) + (1 << (dropped - 1))) >> dropped;
    return (code >> from) * (1 << to) | (magnitude < limit ? magnitude : limit);
}

float value_ref(int code, int scheme, int mantissa, float step, bool polarity) {
    bool negative = polarity;
    float value;
    if (scheme == OTARO_NESTED) {
        value = (static_cast<float>(code) + nested_bias(mantissa)) * step;
    } else {
        value = static_cast<float>(code & ((1 << mantissa) - 1)) * step;
        negative = code >> mantissa != 0;
    }
    return negative ? -value : value;
}

void store_ref(void* values, int dtype, int64_t index, float value) {
    if (dtype == OTARO_FLOAT32) {
        from_float(value, static_cast<float*>(values)[index]);
    } else if (dtype == OTARO_FLOAT16) {
        from_float(value, static_cast<Half*>(values)[index]);
    } else {
        from_float(value, static_cast<Brain*>(values)[index]);
    }
}

void decode_ref(const DecodeJob& job, int64_t first, int64_t last) {
    for_groups(job.geometry, first, last, [&](int64_t group, int64_t offset, int weights) {
        const float size = step(job.codes.exponent[group], job.mantissa);
        const bool polarity = job.format.polarity != 0 && job.codes.polarity[group] != 0;
        for (int64_t i = offset; i < offset + weights; ++i) {
            store_ref(job.value, job.dtype, i,
                      value_ref(job.codes.code[i], job.format.scheme, job.mantissa, size, polarity));
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
    const int group_size = job.geometry.group_size;
    const Deciding& deciding = job.deciding;
    for_groups(job.geometry, first, last, [&](int64_t, int64_t offset, int weights) {
        float buffer[kMaxGroup];
        const uint32_t largest = load_group_ref(job.weight, job.dtype, offset, weights, group_size, buffer);
        const GroupCode group = prepare_group_ref(buffer, weights, job.format, largest);
        const float size = step(group.field, job.mantissa);
        const bool tiered = deciding.count > 1 || deciding.weight[0] != job.weight;
        int codes[kMaxGroup];
        for (int t = 0; tiered && t < deciding.count; ++t) {
            load_group_ref(deciding.weight[t], job.dtype, offset, weights, group_size, buffer);
            for (int i = 0; i < weights; ++i) {
                const float weight = group.polarity ? -buffer[i] : buffer[i];
                const int code = nested_code_ref(weight, group.field, job.format.polarity != 0);
                codes[i] = t == 0 ? code : within_ref(code, codes[i], kWidest - deciding.mantissa[t - 1]);
            }
        }
        for (int i = 0; i < weights; ++i) {
            const int code = tiered ? codes[i] >> (kWidest - job.mantissa)
                                    : code_ref(buffer[i], group.field, job.mantissa, job.format);
            store_ref(job.value, job.dtype, offset + i,
                      value_ref(code, job.format.scheme, job.mantissa, size, group.polarity));
        }
        return true;
    });
}

// One weight of a packed tensor; `position` counts through padded rows.
float plane_value_ref(const PlanesJob& job, int64_t position, float size, bool polarity) {
    const int stored = stored_mantissa(job.format.scheme, job.mantissa);
    int code = job.planes.base[position / 2] >> (4 * (position & 1)) & 15;
    for (int p = 0; p < stored - kNarrowest; ++p) code = code << 1 | stream_bit(job.planes.bits[p], position);
    code = truncate_code_ref(code, job.format.scheme, stored, job.mantissa);
    return value_ref(code, job.format.scheme, job.mantissa, size, polarity);
}

float plane_step_ref(const PlanesJob& job, int64_t group) {
    return step(stream_exponent(job.planes.exponent, group), job.mantissa);
}

bool plane_polarity_ref(const PlanesJob& job, int64_t group) {
    return job.format.polarity != 0 && stream_bit(job.planes.polarity, group);
}

void dequantize_ref(const PlanesJob& job, int64_t first, int64_t last, void* value) {
    int64_t index = 0;
    for_groups(job.geometry, first, last, [&](int64_t group, int64_t, int weights) {
        const float size = plane_step_ref(job, group);
        const bool polarity = plane_polarity_ref(job, group);
        for (int i = 0; i < weights; ++i) {
            const int64_t position = group * job.geometry.group_size + i;
            store_ref(value, job.dtype, index++, plane_value_ref(job, position, size, polarity));
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
                       const float size = plane_step_ref(weight, group);
                       const bool polarity = plane_polarity_ref(weight, group);
                       for (int i = 0; i < weights; ++i) {
                           buffer[i] = plane_value_ref(weight, group * geometry.group_size + i, size, polarity);
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

constexpr Kernels kTable{encode_ref, pack_ref, quantize_ref, decode_ref, truncate_ref, dequantize_ref, linear_ref};

} // namespace

const Kernels* const kernels_ref = &kTable;

} // namespace otaro
