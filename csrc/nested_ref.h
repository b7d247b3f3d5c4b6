// Groups and their E5M8 codes in the scheme "nested", in plain C++.
#pragma once

#include <cmath>

#include "format.h"

namespace otaro {

// The cell of a weight, in steps, by floor. The clamp comes first so that every float converts to int.
static inline int floor_clamped(float scaled, float low, float high) {
    const float clamped = scaled > low ? (scaled < high ? scaled : high) : low;
    return static_cast<int>(std::floor(clamped));
}

static inline int nested_code_ref(float weight, int field, bool polarity) {
    const float scaled = weight * inverse_step(field, kWidest);
    const int low = polarity ? kNestedMinPolarity : kNestedMin;
    // A product that underflows to zero still lies below zero if the weight does.
    const int cell = weight < 0 && scaled == 0 ? -1
                                               : floor_clamped(scaled, static_cast<float>(low - kNestedOffset),
                                                               static_cast<float>(kNestedMax - kNestedOffset));
    return cell + kNestedOffset;
}

struct GroupCode {
    int field;
    bool polarity;
};

// Squared error of a group with exponent field `candidate`, in units of (s_8 of `field` / 256)^2: whole numbers, so that
// every implementation decides alike.
static inline int64_t squared_error_ref(const float* group, int weights, int field, int candidate,
                                        const otaro_format& format) {
    const int mantissa = format.exponent_by_error;
    const float scale = power_of_two(15 + kExponentOffset - field);
    const int twice_bias = static_cast<int>(2 * nested_bias(mantissa));
    int64_t error = 0;
    for (int i = 0; i < weights; ++i) {
        const int64_t target = floor_clamped(group[i] * scale, -kErrorLimit, kErrorLimit);
        const int code = nested_code_ref(group[i], candidate, format.polarity != 0) >> (kWidest - mantissa);
        const int64_t value =
            static_cast<int64_t>(2 * code + twice_bias) * (1 << (kWidest - mantissa + 7)) / (1 << (field - candidate));
        error += (target - value) * (target - value);
    }
    return error;
}

// Decides exponent and polarity of a group from the weights in it, not their padding, and negates it where the polarity
// says so.
static inline GroupCode prepare_group_ref(float* group, int weights, const otaro_format& format, uint32_t largest) {
    GroupCode code{exponent_field(largest), false};
    if (format.polarity != 0) {
        float high = 0, low = 0;
        for (int i = 0; i < weights; ++i) {
            high = group[i] > high ? group[i] : high;
            low = group[i] < low ? group[i] : low;
        }
        code.polarity = high > -low;
        for (int i = 0; code.polarity && i < weights; ++i) group[i] = -group[i];
    }
    if (format.exponent_by_error != 0 && code.field > kFieldMin) {
        const int lowered = code.field - 1;
        if (squared_error_ref(group, weights, code.field, lowered, format) <
            squared_error_ref(group, weights, code.field, code.field, format)) {
            code.field = lowered;
        }
    }
    return code;
}

} // namespace otaro
