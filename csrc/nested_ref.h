// Scales and E5M8 codes of the scheme "nested", in plain C++.
#pragma once

#include <cmath>

#include "format.h"

namespace otaro {

// The cell of a weight, in steps, by floor. The clamp comes first so that every float converts to int.
static inline int floor_clamped(float scaled, int low, int high) {
    const float least = static_cast<float>(low), most = static_cast<float>(high);
    return static_cast<int>(std::floor(scaled > least ? (scaled < most ? scaled : most) : least));
}

static inline int nested_code_ref(float weight, int scale) {
    const float scaled = weight * inverse_step(scale, kWidest);
    // A product that underflows to zero still lies below zero if it has that sign.
    const int cell = weight != 0 && scaled == 0 && std::signbit(scaled)
                         ? -1
                         : floor_clamped(scaled, kNestedMin - kNestedOffset, kNestedMax - kNestedOffset);
    return cell + kNestedOffset;
}

// Squared error of a group with the scale `candidate`, in units of 2^(E-11), where `first` is the byte of 2^E: whole
// numbers, so that every implementation decides alike.
static inline int squared_error_ref(const float* group, int weights, int first, int candidate) {
    constexpr int kLimit = 1 << kErrorUnit;
    const int twice_bias = static_cast<int>(2 * nested_bias(kErrorWidth)), size = error_step(candidate, first);
    int error = 0;
    for (int i = 0; i < weights; ++i) {
        const int target = 2 * floor_clamped(group[i] * inverse_step(first, kErrorUnit), -kLimit, kLimit - 1) + 1;
        const int code = nested_code_ref(group[i], candidate) >> (kWidest - kErrorWidth);
        const int difference = target - (2 * code + twice_bias) * size;
        error += difference * difference;
    }
    return error;
}

// The scale of a group from the weights in it, not their padding; `largest` are the bits of the largest magnitude.
static inline uint8_t scale_ref(const float* group, int weights, int scheme, uint32_t largest) {
    int scale = power_scale(largest);
    if (scheme == OTARO_NESTED && largest != 0) {
        float high = 0, low = 0;
        for (int i = 0; i < weights; ++i) {
            high = group[i] > high ? group[i] : high;
            low = group[i] < low ? group[i] : low;
        }
        const int first = high > -low ? scale | kScaleSign : scale, candidates = candidate_count(first);
        scale = first + 1;
        int least = squared_error_ref(group, weights, first, scale);
        for (int candidate = first; candidate > first + 1 - candidates; --candidate) {
            const int error = squared_error_ref(group, weights, first, candidate);
            if (error < least) {
                least = error;
                scale = candidate;
            }
        }
    }
    return static_cast<uint8_t>(scale);
}

} // namespace otaro
