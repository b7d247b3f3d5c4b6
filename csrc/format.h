// The number format's constants and its arithmetic on one group, shared by all implementations.
//
// Functions here are `static inline` and classes with functions in an anonymous namespace: this header is compiled once for
// each instruction set, and anything with external linkage would leave the linker free to keep the AVX-512 copy for all.
#pragma once

#include <cstdint>
#include <cstring>

#include "otaro_core.h"

namespace otaro {

constexpr int kWidest = 8, kNarrowest = 3;
constexpr int kExponentOffset = 15; // a scale's exponent field is E + 15, E in [-14, 15]; byte 0: all zero
constexpr int kScaleMin = 0x04, kScaleMax = 0x7b, kScaleSign = 0x80;
constexpr int kNestedOffset = 272, kNestedMin = 16, kNestedMax = 511;
constexpr int kErrorWidth = 5; // mantissa bits of the width at which the error of a group decides its scale
constexpr int kErrorUnit = 11; // errors are counted in units of 2^(E-11)
constexpr int kCandidates = 6; // the byte above that of 2^E and the next five below it
constexpr int kMaxGroup = 256;
constexpr int kBlock = 32; // weights handled at a time: the smallest group, 16 bytes of base, 4 bytes of each bit plane
constexpr uint32_t kInfinityBits = 0x7f800000u;

// Above this magnitude a product with the inverse step of E5M8 can underflow to zero (the factor is below 1).
constexpr int kUnderflowScale = (kExponentOffset + kWidest - 1) << 2;

// float16 and bfloat16 by their bits, so that templates and overloads can tell them apart.
struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};
static_assert(sizeof(Half) == 2 && sizeof(Brain) == 2, "weights are read in place");

template <class T> struct Type {
    using type = T;
};

// Calls body(Type<T>) with the C++ type of an otaro_dtype.
template <class Body> static inline void with_dtype(int dtype, const Body& body) {
    switch (dtype) {
    case OTARO_FLOAT32: return body(Type<float>());
    case OTARO_FLOAT16: return body(Type<Half>());
    default: return body(Type<Brain>());
    }
}

static inline uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// 2^exponent for exponents of normal numbers.
static inline float power_of_two(int exponent) { return bits_float(static_cast<uint32_t>(exponent + 127) << 23); }

static inline float to_float(float value) { return value; }
static inline float to_float(Brain value) { return bits_float(static_cast<uint32_t>(value.bits) << 16); }

static inline float to_float(Half value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t exponent = (value.bits >> 10) & 31u, fraction = value.bits & 0x3ffu;
    if (exponent == 0) { // subnormal: fraction * 2^-24, exact
        return bits_float(sign | float_bits(static_cast<float>(fraction) * power_of_two(-24)));
    }
    const uint32_t biased = exponent == 31 ? 255 : exponent + 127 - 15;
    return bits_float(sign | biased << 23 | fraction << 13);
}

// A scale is the upper half of a float16 and the same bits at their place in a float32, but for the exponent's offset: that
// float times this constant is the group's signed step.
static inline float step_constant(int mantissa) { return power_of_two(127 - kExponentOffset + 1 - mantissa); }
static inline float scale_float(uint8_t scale) { return bits_float((scale & 0x80u) << 24 | (scale & 0x7fu) << 21); }
static inline float step(uint8_t scale, int mantissa) { return scale_float(scale) * step_constant(mantissa); }

// Its inverse, as the format defines it: the float32 nearest to that of the mantissa, times a power of two. The sign is set
// without a branch, which could not be foreseen.
constexpr float kInverse[] = {4.0f / 4, 4.0f / 5, 4.0f / 6, 4.0f / 7};
static inline float inverse_step(int scale, int mantissa) {
    const float inverse = kInverse[scale & 3] * power_of_two(mantissa - 1 + kExponentOffset - (scale >> 2 & 31));
    return bits_float(float_bits(inverse) | (static_cast<uint32_t>(scale) & kScaleSign) << 24);
}

static inline float nested_bias(int mantissa) { return 0.5f - 8.5f * static_cast<float>(1 << (mantissa - 3)); }

// The byte of 2^E of a group from the bits of its largest magnitude. A subnormal float32 has biased exponent 0, far below
// the clamp, so its true exponent does not matter.
static inline int power_scale(uint32_t largest) {
    if (largest == 0) return 0;
    const int scale = (static_cast<int>(largest >> 23) - 127 + kExponentOffset) * 4;
    return scale < kScaleMin ? kScaleMin : scale > kScaleMax ? kScaleMax & ~3 : scale;
}

// How many candidates there are for a scale, from the byte above `first`, that of 2^E, down.
static inline int candidate_count(int first) { return (first & ~kScaleSign) > kScaleMin ? kCandidates : 2; }

template <class T> static inline int64_t first_not_finite(const T* weight) {
    int64_t i = 0;
    while ((float_bits(to_float(weight[i])) & kInfinityBits) != kInfinityBits) ++i;
    return i;
}

static inline bool exponent_below(uint32_t largest) { return largest < float_bits(power_of_two(-14)); }
static inline bool exponent_above(uint32_t largest) { return largest >= float_bits(power_of_two(16)); }

// The bits that must be at hand to decode at a width: "nearest" rounds a narrower width from one bit more.
static inline int stored_mantissa(int scheme, int mantissa) {
    return scheme == OTARO_NEAREST && mantissa < kWidest ? mantissa + 1 : mantissa;
}

static inline int plane_bit(const uint8_t* plane, int64_t weight) { return plane[weight >> 3] >> (weight & 7) & 1; }

// Half the distance between two values of kErrorWidth with the scale `candidate`, in units of 2^(E-11), where `first` is the
// byte of 2^E. Values are odd multiples of it.
static inline int error_step(int candidate, int first) {
    return (4 + (candidate & 3)) << (kErrorUnit - 2 - kErrorWidth + (candidate >> 2) - (first >> 2));
}

// ---- rounding to nearest even ----------------------------------------------------------------------------------------

static inline void from_float(float value, float& result) { result = value; }

static inline void from_float(float value, Brain& result) {
    const uint32_t bits = float_bits(value);
    const bool nan = (bits & 0x7fffffffu) > kInfinityBits;
    result.bits = static_cast<uint16_t>(nan ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline void from_float(float value, Half& result) {
    const uint32_t bits = float_bits(value), magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > kInfinityBits) {
        half = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) { // 65520 and more round to infinity
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) { // below 2^-14: adding 0.5 leaves units of 2^-24, rounded by the addition
        half = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
    } else {
        half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    }
    result.bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

} // namespace otaro
