// The E5M8 code of one weight of the scheme "nested", in plain C++.
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

} // namespace otaro
