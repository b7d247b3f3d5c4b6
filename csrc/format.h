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
constexpr int kExponentOffset = 15, kFieldMin = 1, kFieldMax = 30; // field = E + 15, E in [-14, 15]; 0: all zero
constexpr int kNestedOffset = 272, kNestedMin = 32, kNestedMinPolarity = 16, kNestedMax = 511;
constexpr float kErrorLimit = 1048576.0f;
constexpr int kMaxGroup = 256;
constexpr int kBlock = 32; // weights handled at a time: the smallest group, 16 bytes of base, 4 bytes of each bit plane
constexpr int kExponentBits = 5;
constexpr uint32_t kInfinityBits = 0x7f800000u;

// Above this field a product with the inverse step of E5M8 can underflow to zero (the factor is below 1).
constexpr int kUnderflowField = kExponentOffset + kWidest - 1;

// float16 and bfloat16 by their bits, so that templates and overloads can tell them apart.
struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};
static_assert(sizeof(Half) == 2 && sizeof(Brain) == 2, "weights are read in place");

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

static inline float step(int field, int mantissa) {
    return field == 0 ? 0.0f : power_of_two(field - kExponentOffset + 1 - mantissa);
}

static inline float inverse_step(int field, int mantissa) {
    return power_of_two(mantissa - 1 + kExponentOffset - field);
}

static inline float nested_bias(int mantissa) { return 0.5f - 8.5f * static_cast<float>(1 << (mantissa - 3)); }

// The exponent field of a group from the bits of its largest magnitude. A subnormal float32 has biased exponent 0, far
// below the clamp, so its true exponent does not matter.
static inline int exponent_field(uint32_t largest) {
    if (largest == 0) return 0;
    const int field = static_cast<int>(largest >> 23) - 127 + kExponentOffset;
    return field < kFieldMin ? kFieldMin : field > kFieldMax ? kFieldMax : field;
}

static inline bool exponent_below(uint32_t largest) { return largest != 0 && largest < float_bits(power_of_two(-14)); }
static inline bool exponent_above(uint32_t largest) { return largest >= float_bits(power_of_two(16)); }

// The bits that must be at hand to decode at a width: "nearest" rounds a narrower width from one bit more.
static inline int stored_mantissa(int scheme, int mantissa) {
    return scheme == OTARO_NEAREST && mantissa < kWidest ? mantissa + 1 : mantissa;
}

// ---- 5-bit and 1-bit streams ----------------------------------------------------------------------------------------

static inline int stream_exponent(const uint8_t* stream, int64_t entry) {
    const int64_t position = entry * kExponentBits;
    const int shift = static_cast<int>(position & 7);
    int value = stream[position >> 3] >> shift;
    if (shift > 8 - kExponentBits) value |= stream[(position >> 3) + 1] << (8 - shift);
    return value & 31;
}

static inline bool stream_bit(const uint8_t* stream, int64_t entry) { return (stream[entry >> 3] >> (entry & 7)) & 1; }

// Writes entries of a stream one after another. It begins on a whole byte: at an entry that is a multiple of 8.
namespace {
class StreamWriter {
  public:
    StreamWriter(uint8_t* stream, int64_t entry, int width) : next_(stream + entry / 8 * width), width_(width) {}

    void put(unsigned value) {
        pending_ |= value << fill_;
        fill_ += width_;
        while (fill_ >= 8) {
            *next_++ = static_cast<uint8_t>(pending_);
            pending_ >>= 8;
            fill_ -= 8;
        }
    }

    // The last byte of the whole stream, filled with zeros.
    void finish() {
        if (fill_ > 0) *next_ = static_cast<uint8_t>(pending_);
    }

  private:
    uint8_t* next_;
    int width_;
    unsigned pending_ = 0;
    int fill_ = 0;
};
} // namespace

// ---- exact conversions, round to nearest even -----------------------------------------------------------------------

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
