// Weights to codes: as int16, as planes, or decoded at once (fake quantisation).
#pragma once

#include "simd.h"
#include "simd_decode.h"

namespace otaro {
namespace {

// u = clamp(floor(w / s_8) + 272), then cut to a width. The clamp comes before the floor: its bounds are whole numbers, so
// the result is the same, and every float then converts to int. `kUnderflow` is for large exponents, where the product can
// underflow to zero: a weight below zero still belongs to the cell below zero.
template <class V, bool kUnderflow, bool kCut> class NestedCoder {
  public:
    static constexpr bool kNested = true;
    using F = typename V::F;
    using I = typename V::I;

    NestedCoder(int field, bool negate, bool polarity, int mantissa)
        : inverse_(V::set1(negate ? -inverse_step(field, kWidest) : inverse_step(field, kWidest))),
          sign_(V::set1(negate ? -1.0f : 1.0f)),
          low_(V::set1(static_cast<float>((polarity ? kNestedMinPolarity : kNestedMin) - kNestedOffset))),
          high_(V::set1(static_cast<float>(kNestedMax - kNestedOffset))), offset_(V::set1i(kNestedOffset)),
          cut_(V::count(kWidest - mantissa)) {}

    I operator()(F weight) const {
        F scaled = V::mul(weight, inverse_);
        if (kUnderflow) {
            const F below = V::min(scaled, V::set1(-0.5f));
            scaled = V::select(V::less_than_zero(V::mul(weight, sign_)), below, scaled);
        }
        const I code = V::addi(V::floor_int(V::min(V::max(scaled, low_), high_)), offset_);
        return kCut ? V::shift_right(code, cut_) : code;
    }

  private:
    F inverse_, sign_, low_, high_;
    I offset_;
    typename V::Count cut_;
};

// Sign and magnitude, the magnitude rounded ("nearest") or cut ("truncate").
template <class V, bool kRound> class SignCoder {
  public:
    static constexpr bool kNested = false;
    using F = typename V::F;
    using I = typename V::I;

    SignCoder(int field, int mantissa)
        : inverse_(V::set1(inverse_step(field, mantissa))), limit_(V::set1(static_cast<float>((1 << mantissa) - 1))),
          sign_(V::set1i(1 << mantissa)) {}

    I operator()(F weight) const {
        const F scaled = V::min(V::mul(V::abs(weight), inverse_), limit_);
        const I magnitude = kRound ? V::round_int(scaled) : V::trunc_int(scaled);
        return V::ori(magnitude, V::keep(V::less_than_zero(weight), sign_));
    }

  private:
    F inverse_, limit_;
    I sign_;
};

// The code nearest to another in the cell of a narrower width's: alike but for the bits dropped from the right.
template <class V> class Within {
  public:
    using I = typename V::I;
    Within() = default;
    explicit Within(int dropped) : kept_(V::set1i(-(1 << dropped))), rest_(V::set1i((1 << dropped) - 1)) {}

    I operator()(I code, I narrower) const {
        return V::mini(V::maxi(code, V::andi(narrower, kept_)), V::ori(narrower, rest_));
    }

  private:
    I kept_, rest_;
};

template <class V, class T, class Coder, class Sink>
void encode_blocks(const T* weight, int size, const Coder& coder, const Sink& sink) {
    for (int i = 0; i < size; i += kBlock) {
        Block<V> block;
        for (int v = 0; v < Block<V>::kParts; ++v) block.part[v] = coder(V::load(weight + i + v * V::kLanes));
        sink(i, block, Number<Coder::kNested>());
    }
}

struct Group {
    uint32_t largest; // bits of the largest magnitude
    int field;
    bool negate;
};

// Hands the codes of a group at a width to the sink: sink(position in the group, block, Number<1 if nested, else 0>).
template <class V, class T, class Sink>
void encode_group(const T* weight, int size, const otaro_format& format, const Group& group, int mantissa,
                  const Sink& sink) {
    if (format.scheme == OTARO_TRUNCATE) {
        encode_blocks<V>(weight, size, SignCoder<V, false>(group.field, mantissa), sink);
    } else if (format.scheme == OTARO_NEAREST) {
        encode_blocks<V>(weight, size, SignCoder<V, true>(group.field, mantissa), sink);
    } else if (group.field > kUnderflowField) {
        const NestedCoder<V, true, true> coder(group.field, group.negate, format.polarity != 0, mantissa);
        encode_blocks<V>(weight, size, coder, sink);
    } else if (mantissa < kWidest) {
        const NestedCoder<V, false, true> coder(group.field, group.negate, format.polarity != 0, mantissa);
        encode_blocks<V>(weight, size, coder, sink);
    } else {
        const NestedCoder<V, false, false> coder(group.field, group.negate, format.polarity != 0, mantissa);
        encode_blocks<V>(weight, size, coder, sink);
    }
}

template <class V, class T, class Coder, class Sink>
void encode_blocks_within(const T* const* tiers, const Deciding& deciding, int size, int mantissa, const Coder& coder,
                          const Sink& sink) {
    const typename V::Count cut = V::count(kWidest - mantissa);
    Within<V> within[OTARO_WIDTHS];
    for (int t = 1; t < deciding.count; ++t) within[t - 1] = Within<V>(kWidest - deciding.mantissa[t - 1]);
    for (int i = 0; i < size; i += kBlock) {
        Block<V> block;
        for (int v = 0; v < Block<V>::kParts; ++v) {
            const int position = i + v * V::kLanes;
            typename V::I code = coder(V::load(tiers[0] + position));
            for (int t = 1; t < deciding.count; ++t) code = within[t - 1](coder(V::load(tiers[t] + position)), code);
            block.part[v] = V::shift_right(code, cut);
        }
        sink(i, block, Number<1>());
    }
}

// As encode_group, for codes that several weights decide, one after another.
template <class V, class T, class Sink>
void encode_group_within(const T* const* tiers, const Deciding& deciding, int size, const otaro_format& format,
                         const Group& group, int mantissa, const Sink& sink) {
    if (group.field > kUnderflowField) {
        const NestedCoder<V, true, false> coder(group.field, group.negate, format.polarity != 0, kWidest);
        encode_blocks_within<V>(tiers, deciding, size, mantissa, coder, sink);
    } else {
        const NestedCoder<V, false, false> coder(group.field, group.negate, format.polarity != 0, kWidest);
        encode_blocks_within<V>(tiers, deciding, size, mantissa, coder, sink);
    }
}

// Squared error of a group with exponent field `candidate`, in units of (s_8 of `field` / 256)^2: whole numbers, exact.
template <class V, class T>
int64_t squared_error(const T* weight, int size, const otaro_format& format, const Group& group, int candidate) {
    using F = typename V::F;
    using I = typename V::I;
    const int mantissa = format.exponent_by_error, lowered = group.field - candidate;
    const float unit = power_of_two(15 + kExponentOffset - group.field);
    const F scale = V::set1(group.negate ? -unit : unit);
    const F low = V::set1(-kErrorLimit), high = V::set1(kErrorLimit);
    const I twice_bias = V::set1i(static_cast<int>(2 * nested_bias(mantissa)));
    const typename V::Count shift = V::count(kWidest - mantissa + 7 - lowered);
    typename V::L sum = V::zerol();
    const Group tried{group.largest, candidate, group.negate};
    encode_group<V>(weight, size, format, tried, mantissa, [&](int i, const Block<V>& block, auto) {
        for (int v = 0; v < Block<V>::kParts; ++v) {
            const F scaled = V::mul(V::load(weight + i + v * V::kLanes), scale);
            const I target = V::floor_int(V::min(V::max(scaled, low), high));
            const I twice = V::addi(V::addi(block.part[v], block.part[v]), twice_bias);
            sum = V::add_square(sum, V::subi(target, V::shift_left(twice, shift)));
        }
    });
    return V::sum(sum);
}

// The largest magnitude and, where wanted, whether the largest weight is the positive one.
template <class V, class T, bool kPolarity>
__attribute__((always_inline)) inline Group measure(const T* weight, int size) {
    using F = typename V::F;
    typename V::I largest = V::set1i(0);
    F high = V::set1(0.0f), low = V::set1(0.0f);
    for (int i = 0; i < size; i += kBlock) {
        for (int v = 0; v < Block<V>::kParts; ++v) {
            const F x = V::load(weight + i + v * V::kLanes);
            largest = V::maxi(largest, V::bits(V::abs(x)));
            if (kPolarity) {
                high = V::max(x, high);
                low = V::min(x, low);
            }
        }
    }
    Group group;
    group.largest = static_cast<uint32_t>(V::largest(largest));
    group.field = exponent_field(group.largest);
    // Compared as whole numbers: neither is negative.
    group.negate = kPolarity && V::largest(V::bits(V::abs(high))) > V::largest(V::bits(V::abs(low)));
    return group;
}

// The better one of a group's exponent field and the next lower one. Not inlined: rarely asked for, and its registers
// would burden the usual path.
template <class V, class T>
__attribute__((noinline)) int field_by_error(const T* weight, int size, int weights, const otaro_format& format,
                                             const Group& group) {
    // The zeros that fill a short group do not count: each adds the square of a zero's value, half an M-step, or nothing
    // where the width has a true zero; at the lower exponent a quarter of it.
    const int mantissa = format.exponent_by_error;
    const int64_t zero = mantissa == kNarrowest ? 0 : 1 << (15 - mantissa);
    const int64_t padding = static_cast<int64_t>(size - weights) * zero * zero;
    const int lowered = group.field - 1;
    const int64_t error = squared_error<V>(weight, size, format, group, group.field) - padding;
    return squared_error<V>(weight, size, format, group, lowered) - padding / 4 < error ? lowered : group.field;
}

template <class V, class T> inline Group prepare(const T* weight, int size, int weights, const otaro_format& format) {
    Group group = format.polarity != 0 ? measure<V, T, true>(weight, size) : measure<V, T, false>(weight, size);
    if (format.exponent_by_error != 0 && group.field > kFieldMin) {
        group.field = field_by_error<V>(weight, size, weights, format, group);
    }
    return group;
}

template <class T> int64_t first_not_finite(const T* weight) {
    int64_t i = 0;
    while ((float_bits(to_float(weight[i])) & kInfinityBits) != kInfinityBits) ++i;
    return i;
}

constexpr int kAhead = 8; // groups

// Visits groups [first, last) of weights: body(group's number, offset, weights in it, data filled up to a whole group,
// Group). Measures several groups before the first of them is encoded: within one group every step waits for the one
// before (largest magnitude, exponent, scale, codes), and only groups that do not depend on each other fill that time.
// Stops at a weight that is not finite where `findings` asks to know.
template <class V, class T, class Body>
void for_weights(const Geometry& geometry, const otaro_format& format, const void* data, int64_t first, int64_t last,
                 Findings* findings, const Body& body) {
    struct Visit {
        int64_t offset;
        int weights;
        const T* weight;
        Group group;
    };
    const int size = geometry.group_size;
    T buffer[kAhead][kMaxGroup];
    Visit visits[kAhead];
    for (int64_t start = first; start < last; start += kAhead) {
        const int64_t end = last - start < kAhead ? last : start + kAhead;
        int count = 0;
        for_groups(geometry, start, end, [&](int64_t, int64_t offset, int weights) {
            const T* const weight = padded(static_cast<const T*>(data) + offset, weights, size, buffer[count]);
            visits[count++] = {offset, weights, weight, prepare<V>(weight, size, weights, format)};
            return true;
        });
        for (int i = 0; findings != nullptr && i < count; ++i) {
            const uint32_t largest = visits[i].group.largest;
            if (largest >= kInfinityBits) {
                findings->not_finite = visits[i].offset + first_not_finite(visits[i].weight);
                return;
            }
            findings->below += exponent_below(largest);
            findings->above += exponent_above(largest);
        }
        for (int i = 0; i < count; ++i) {
            body(start + i, visits[i].offset, visits[i].weights, visits[i].weight, visits[i].group);
        }
    }
}

template <class V> void encode(const EncodeJob& job, int64_t first, int64_t last, Findings& findings) {
    const int size = job.geometry.group_size;
    with_dtype(job.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const auto body = [&](int64_t index, int64_t offset, int weights, const T* weight, const Group& group) {
            int16_t codes[kMaxGroup];
            job.codes.exponent[index] = static_cast<uint8_t>(group.field);
            if (job.format.polarity != 0) job.codes.polarity[index] = group.negate;
            int16_t* const target = weights == size ? job.codes.code + offset : codes;
            encode_group<V>(weight, size, job.format, group, job.mantissa,
                            [&](int i, const Block<V>& block, auto) { V::store_codes(target + i, block); });
            if (weights < size) memcpy(job.codes.code + offset, codes, static_cast<size_t>(weights) * sizeof *codes);
        };
        for_weights<V, T>(job.geometry, job.format, job.weight, first, last, &findings, body);
    });
}

template <class V> void pack(const PackJob& job, int64_t first, int64_t last, Findings& findings) {
    const int size = job.geometry.group_size;
    const otaro_planes& planes = job.planes;
    StreamWriter exponents(planes.exponent, first, kExponentBits), polarities(planes.polarity, first, 1);
    with_dtype(job.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const auto body = [&](int64_t index, int64_t, int, const T* weight, const Group& group) {
            exponents.put(static_cast<unsigned>(group.field));
            if (job.format.polarity != 0) polarities.put(group.negate);
            encode_group<V>(weight, size, job.format, group, kWidest, [&](int i, const Block<V>& block, auto) {
                const int64_t position = index * size + i;
                uint32_t words[OTARO_BIT_PLANES];
                V::pack(block, planes.base + position / 2, words);
                for (int64_t p = 0; p < planes.bits_count; ++p) {
                    memcpy(planes.bits[p] + position / 8, &words[p], sizeof words[p]);
                }
            });
        };
        for_weights<V, T>(job.geometry, job.format, job.weight, first, last, &findings, body);
    });
    exponents.finish();
    if (job.format.polarity != 0) polarities.finish();
}

template <class V> void quantize(const QuantizeJob& job, int64_t first, int64_t last) {
    const int size = job.geometry.group_size, mantissa = job.mantissa;
    const Deciding& deciding = job.deciding;
    const bool tiered = deciding.count > 1 || deciding.weight[0] != job.weight;
    with_dtype(job.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const auto body = [&](int64_t, int64_t offset, int weights, const T* weight, const Group& group) {
            T values[kMaxGroup];
            T* const result = static_cast<T*>(job.value) + offset;
            T* const target = weights == size ? result : values;
            const NestedDecoder<V> nested_decoder(group.field, group.negate, mantissa);
            const SignDecoder<V> sign_decoder(group.field, mantissa);
            const auto store = [&](int i, const Block<V>& block, auto nested) {
                for (int v = 0; v < Block<V>::kParts; ++v) {
                    if constexpr (decltype(nested)::value) {
                        V::store(target + i + v * V::kLanes, nested_decoder(block.part[v]));
                    } else {
                        V::store(target + i + v * V::kLanes, sign_decoder(block.part[v]));
                    }
                }
            };
            if (!tiered) {
                encode_group<V>(weight, size, job.format, group, mantissa, store);
            } else {
                T buffer[OTARO_WIDTHS + 1][kMaxGroup];
                const T* tiers[OTARO_WIDTHS + 1];
                for (int t = 0; t < deciding.count; ++t) {
                    tiers[t] = padded(static_cast<const T*>(deciding.weight[t]) + offset, weights, size, buffer[t]);
                }
                encode_group_within<V>(tiers, deciding, size, job.format, group, mantissa, store);
            }
            if (weights < size) memcpy(result, values, static_cast<size_t>(weights) * sizeof(T));
        };
        for_weights<V, T>(job.geometry, job.format, job.weight, first, last, nullptr, body);
    });
}

} // namespace
} // namespace otaro
