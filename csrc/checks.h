// What the C ABI checks before it touches memory.
#pragma once

#include <cstdint>

#include "dispatch.h"
#include "format.h"
#include "kernels.h"

namespace otaro {
namespace {

constexpr int64_t kRangeWeights = 32768; // weights in a range of work: enough to hide handing it out, few enough for L2
constexpr int32_t kMaxThreads = 1024;

inline int check_format(const otaro_format* format) {
    if (format == nullptr) return OTARO_ERROR_ARGUMENT;
    if (format->scheme < OTARO_TRUNCATE || format->scheme > OTARO_NESTED) return OTARO_ERROR_ARGUMENT;
    const int size = format->group_size;
    if (size != 32 && size != 64 && size != 128 && size != 256) return OTARO_ERROR_ARGUMENT;
    return OTARO_OK;
}

inline bool valid_mantissa(int mantissa) { return mantissa >= kNarrowest && mantissa <= kWidest; }
inline bool valid_dtype(int dtype) { return dtype >= OTARO_FLOAT32 && dtype <= OTARO_BFLOAT16; }
inline int64_t dtype_bytes(int dtype) { return dtype == OTARO_FLOAT32 ? 4 : 2; }

// Whether bytes are scales of a scheme. Without branches, so that the compiler looks at many at a time.
inline bool valid_scales(const uint8_t* scale, int64_t count, int scheme) {
    const uint8_t unused = scheme == OTARO_NESTED ? 0 : kScaleSign | 3;
    uint8_t bad = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint8_t above = static_cast<uint8_t>((scale[i] & ~kScaleSign) - kScaleMin);
        const uint8_t outside = above > kScaleMax - kScaleMin && scale[i] != 0;
        bad |= static_cast<uint8_t>(outside | (scale[i] & unused));
    }
    return bad == 0;
}

// Collects the first error; the rest of a chain of checks then does nothing.
class Checks {
  public:
    Checks(const otaro_format* format, int64_t rows, int64_t columns) : error_(check_format(format)) {
        require(rows >= 0 && columns >= 0);
        if (error_ != OTARO_OK) return;
        format_ = *format;
        const int64_t groups = columns / format->group_size + (columns % format->group_size != 0);
        geometry_ = {rows, columns, groups, format->group_size};
        // Everything computed from here on is at most 4 bytes times the padded weights.
        int64_t bytes;
        if (__builtin_mul_overflow(rows, groups, &bytes) ||
            __builtin_mul_overflow(bytes, int64_t{kMaxGroup * 8}, &bytes)) {
            error_ = OTARO_ERROR_ARGUMENT;
            geometry_ = {0, 0, 0, kBlock};
        }
    }

    void require(bool condition, int error = OTARO_ERROR_ARGUMENT) {
        if (error_ == OTARO_OK && !condition) error_ = error;
    }

    void buffer(const void* data, int64_t bytes, int64_t needed) {
        require(data != nullptr || needed == 0);
        require(bytes >= needed, OTARO_ERROR_BUFFER);
    }

    // `count` entries of `size` bytes each.
    void buffer(const void* data, int64_t bytes, int64_t count, int64_t size) {
        int64_t needed = 0;
        require(count >= 0 && !__builtin_mul_overflow(count, size, &needed));
        buffer(data, bytes, needed);
    }

    // Weights to be encoded; `scale` may be null.
    Weights from(const void* weight, int64_t bytes, int dtype, const uint8_t* scale, int64_t scale_bytes) {
        require(valid_dtype(dtype));
        buffer(weight, bytes, weights(), dtype_bytes(dtype));
        if (scale != nullptr) scales(scale, scale_bytes);
        return {geometry_, format_, weight, dtype, scale};
    }

    void tiers(const otaro_tiers* tiers, int dtype) {
        if (error_ != OTARO_OK || tiers == nullptr) return;
        require(tiers->count >= 0 && tiers->count <= OTARO_WIDTHS);
        require(format_.scheme == OTARO_NESTED || tiers->count == 0);
        for (int i = 0; error_ == OTARO_OK && i < tiers->count; ++i) {
            require(valid_mantissa(tiers->mantissa[i]) && (i == 0 || tiers->mantissa[i] > tiers->mantissa[i - 1]));
            buffer(tiers->weight[i], tiers->weight_bytes[i], weights(), dtype_bytes(dtype));
        }
    }

    void planes(const otaro_planes* planes, int count) {
        require(planes != nullptr);
        if (error_ != OTARO_OK) return;
        require(planes->bits_count >= 0 && planes->bits_count <= OTARO_BIT_PLANES);
        require(planes->bits_count >= count, OTARO_ERROR_PLANES);
        const int64_t padded = all_groups() * geometry_.group_size;
        buffer(planes->base, planes->base_bytes, padded / 2);
        for (int p = 0; p < count && error_ == OTARO_OK; ++p)
            buffer(planes->bits[p], planes->bits_bytes[p], padded / 8);
        buffer(planes->scale, planes->scale_bytes, all_groups());
    }

    void codes(const otaro_codes* codes) {
        require(codes != nullptr);
        if (error_ != OTARO_OK) return;
        buffer(codes->code, codes->code_bytes, weights(), sizeof(int16_t));
        buffer(codes->scale, codes->scale_bytes, all_groups());
    }

    // Scales that are about to be read.
    void scales(const uint8_t* scale, int64_t bytes) {
        buffer(scale, bytes, all_groups());
        require(error_ != OTARO_OK || valid_scales(scale, all_groups(), format_.scheme), OTARO_ERROR_SCALE);
    }

    // Planes that are about to be read at a width; of picked rows only, their scales are looked at with them.
    void planes_of(const otaro_planes* planes, int mantissa, bool all_rows = true) {
        require(valid_mantissa(mantissa));
        this->planes(planes, stored_mantissa(format_.scheme, mantissa) - kNarrowest);
        if (error_ == OTARO_OK && all_rows) scales(planes->scale, planes->scale_bytes);
    }

    // The kernels to run, once all is checked.
    const Kernels* kernels(int32_t threads, int32_t isa) {
        require(threads >= 1 && threads <= kMaxThreads);
        require(isa >= OTARO_AUTO && isa <= OTARO_NEON);
        const Kernels* const found = error_ == OTARO_OK ? kernels_for(isa) : nullptr;
        require(found != nullptr, OTARO_ERROR_ISA);
        return found;
    }

    int error() const { return error_; }
    const Geometry& geometry() const { return geometry_; }
    int64_t weights() const { return geometry_.rows * geometry_.columns; }
    int64_t all_groups() const { return geometry_.rows * geometry_.groups; }
    int64_t group_grain() const { return kRangeWeights / geometry_.group_size; }

  private:
    int error_;
    otaro_format format_{OTARO_NESTED, kBlock};
    Geometry geometry_{0, 0, 0, kBlock};
};

// No exception crosses the ABI.
template <class Body> int32_t guarded(const Body& body) noexcept {
    try {
        return body();
    } catch (...) {
        return OTARO_ERROR_INTERNAL;
    }
}

} // namespace
} // namespace otaro
