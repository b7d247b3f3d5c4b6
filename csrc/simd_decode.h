// Codes and planes to values.
#pragma once

#include "simd.h"

namespace otaro {
namespace {

// Codes of one group at a width to float32. Addition and multiplication stay apart: fused, a zero would lose its sign.
template <class V> class NestedDecoder {
  public:
    NestedDecoder(uint8_t scale, int mantissa)
        : bias_(V::set1(nested_bias(mantissa))), step_(V::set1(step(scale, mantissa))) {}

    typename V::F operator()(typename V::I code) const { return V::mul(V::add(V::to_float(code), bias_), step_); }

  private:
    typename V::F bias_, step_;
};

template <class V> class SignDecoder {
  public:
    SignDecoder(uint8_t scale, int mantissa)
        : step_(V::set1(step(scale, mantissa))), mask_(V::set1i((1 << mantissa) - 1)), mantissa_(V::count(mantissa)) {}

    typename V::F operator()(typename V::I code) const {
        const typename V::F value = V::mul(V::to_float(V::andi(code, mask_)), step_);
        return V::negate_where(value, V::shift_right(code, mantissa_));
    }

  private:
    typename V::F step_;
    typename V::I mask_;
    typename V::Count mantissa_;
};

// "nearest" codes to a narrower width: the magnitude is rounded.
template <class V> class RoundingCut {
  public:
    RoundingCut(int from, int to)
        : mask_(V::set1i((1 << from) - 1)), half_(V::set1i((1 << (from - to)) >> 1)), limit_(V::set1i((1 << to) - 1)),
          from_(V::count(from)), to_(V::count(to)), dropped_(V::count(from - to)) {}

    typename V::I operator()(typename V::I code) const {
        const typename V::I magnitude = V::shift_right(V::addi(V::andi(code, mask_), half_), dropped_);
        return V::ori(V::shift_left(V::shift_right(code, from_), to_), V::mini(magnitude, limit_));
    }

  private:
    typename V::I mask_, half_, limit_;
    typename V::Count from_, to_, dropped_;
};

template <class V> void decode(const DecodeJob& job, int64_t first, int64_t last) {
    const int size = job.geometry.group_size;
    with_dtype(job.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        for_groups(job.geometry, first, last, [&](int64_t index, int64_t offset, int weights) {
            int16_t buffer[kMaxGroup];
            T values[kMaxGroup];
            const int16_t* const code = padded<int16_t>(job.codes.code + offset, weights, size, buffer);
            T* const result = static_cast<T*>(job.value) + offset;
            T* const target = weights == size ? result : values;
            const auto blocks = [&](const auto& decoder) {
                for (int i = 0; i < size; i += kBlock) {
                    Block<V> block;
                    V::load_codes(code + i, block);
                    for (int v = 0; v < Block<V>::kParts; ++v) {
                        V::store(target + i + v * V::kLanes, decoder(block.part[v]));
                    }
                }
            };
            const uint8_t scale = job.codes.scale[index];
            if (job.format.scheme == OTARO_NESTED) {
                blocks(NestedDecoder<V>(scale, job.mantissa));
            } else {
                blocks(SignDecoder<V>(scale, job.mantissa));
            }
            if (weights < size) memcpy(result, values, static_cast<size_t>(weights) * sizeof(T));
            return true;
        });
    });
}

template <class V> void truncate(const TruncateJob& job, int64_t first, int64_t last) {
    const auto cut_block = [&](const int16_t* code, int16_t* result) {
        Block<V> block;
        V::load_codes(code, block);
        for (int v = 0; v < Block<V>::kParts; ++v) {
            typename V::I& part = block.part[v];
            part = job.scheme == OTARO_NEAREST ? RoundingCut<V>(job.from, job.to)(part)
                                               : V::shift_right(part, V::count(job.from - job.to));
        }
        V::store_codes(result, block);
    };
    int64_t i = first;
    for (; last - i >= kBlock; i += kBlock) cut_block(job.code + i, job.result + i);
    if (i < last) {
        const int rest = static_cast<int>(last - i);
        int16_t buffer[kBlock], result[kBlock];
        cut_block(padded<int16_t>(job.code + i, rest, kBlock, buffer), result);
        memcpy(job.result + i, result, static_cast<size_t>(rest) * sizeof *result);
    }
}

// ---- planes to values -----------------------------------------------------------------------------------------------

// All values of one group, the padding too.
template <class V, class T, int kPlanes> void dequantize_group(const PlanesJob& job, int64_t index, T* values) {
    const int size = job.geometry.group_size;
    const int stored = kNarrowest + kPlanes;
    const uint8_t scale = job.planes.scale[index];
    const auto blocks = [&](const auto& value) {
        for (int i = 0; i < size; i += kBlock) {
            const int64_t position = index * size + i;
            Block<V> block;
            V::template unpack<kPlanes>(job.planes.base + position / 2, job.planes.bits, position / 8, block);
            for (int v = 0; v < Block<V>::kParts; ++v) V::store(values + i + v * V::kLanes, value(block.part[v]));
        }
    };
    if (job.format.scheme == OTARO_NESTED) {
        blocks(NestedDecoder<V>(scale, job.mantissa));
    } else if (job.mantissa == stored) {
        blocks(SignDecoder<V>(scale, job.mantissa));
    } else {
        const RoundingCut<V> cut(stored, job.mantissa);
        const SignDecoder<V> decoder(scale, job.mantissa);
        blocks([&](typename V::I code) { return decoder(cut(code)); });
    }
}

template <class V> void dequantize(const PlanesJob& job, int64_t first, int64_t last, void* value) {
    const int size = job.geometry.group_size;
    with_planes(stored_mantissa(job.format.scheme, job.mantissa) - kNarrowest, [&](auto planes) {
        with_dtype(job.dtype, [&](auto type) {
            using T = typename decltype(type)::type;
            T* result = static_cast<T*>(value);
            for_groups(job.geometry, first, last, [&](int64_t index, int64_t, int weights) {
                T values[kMaxGroup];
                dequantize_group<V, T, decltype(planes)::value>(job, index, weights == size ? result : values);
                if (weights < size) memcpy(result, values, static_cast<size_t>(weights) * sizeof(T));
                result += weights;
                return true;
            });
        });
    });
}

} // namespace
} // namespace otaro
