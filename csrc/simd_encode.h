// Weights to codes: as int16, as planes, or decoded at once (fake quantisation).
#pragma once

#include <algorithm>

#include "simd.h"
#include "simd_decode.h"

namespace otaro {
namespace {

// u = clamp(floor(w / s_8) + 272), then cut to a width. The clamp comes before the floor: its bounds are whole numbers, so
// the result is the same, and every float then converts to int. `kUnderflow` is for large scales, where the product can
// underflow to zero: a weight below zero still belongs to the cell below zero.
template <class V, bool kUnderflow> class NestedCoder {
  public:
    using F = typename V::F;
    using I = typename V::I;

    NestedCoder(int scale, int mantissa)
        : inverse_(V::set1(inverse_step(scale, kWidest))), sign_(V::set1(scale & kScaleSign ? -1.0f : 1.0f)),
          low_(V::set1(static_cast<float>(kNestedMin - kNestedOffset))),
          high_(V::set1(static_cast<float>(kNestedMax - kNestedOffset))), offset_(V::set1i(kNestedOffset)),
          cut_(V::count(kWidest - mantissa)) {}

    I operator()(F weight) const {
        F scaled = V::mul(weight, inverse_);
        if (kUnderflow) {
            const F below = V::min(scaled, V::set1(-0.5f));
            scaled = V::select(V::less_than_zero(V::mul(weight, sign_)), below, scaled);
        }
        return V::shift_right(V::addi(V::floor_int(V::min(V::max(scaled, low_), high_)), offset_), cut_);
    }

  private:
    F inverse_, sign_, low_, high_;
    I offset_;
    typename V::Count cut_;
};

// Sign and magnitude, the magnitude rounded ("nearest") or cut ("truncate").
template <class V, bool kRound> class SignCoder {
  public:
    using F = typename V::F;
    using I = typename V::I;

    SignCoder(int scale, int mantissa)
        : inverse_(V::set1(inverse_step(scale, mantissa))), limit_(V::set1(static_cast<float>((1 << mantissa) - 1))),
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

// Hands codes to the sink: sink(position in the group, block), where code(position) gives a vector of them.
template <class V, class Code, class Sink> void encode_blocks(int size, const Code& code, const Sink& sink) {
    for (int i = 0; i < size; i += kBlock) {
        Block<V> block;
        for (int v = 0; v < Block<V>::kParts; ++v) block.part[v] = code(i + v * V::kLanes);
        sink(i, block);
    }
}

// Calls body(coder) with the coder of a nested scale.
template <class V, class Body> void with_nested(int scale, int mantissa, const Body& body) {
    if ((scale & ~kScaleSign) > kUnderflowScale) {
        body(NestedCoder<V, true>(scale, mantissa));
    } else {
        body(NestedCoder<V, false>(scale, mantissa));
    }
}

// The codes of a group at a width.
template <class V, class T, class Sink>
void encode_group(const T* weight, int size, int scheme, int scale, int mantissa, const Sink& sink) {
    const auto blocks = [&](const auto& coder) {
        encode_blocks<V>(size, [&](int i) { return coder(V::load(weight + i)); }, sink);
    };
    if (scheme == OTARO_TRUNCATE) {
        blocks(SignCoder<V, false>(scale, mantissa));
    } else if (scheme == OTARO_NEAREST) {
        blocks(SignCoder<V, true>(scale, mantissa));
    } else {
        with_nested<V>(scale, mantissa, blocks);
    }
}

// The same for codes that several weights decide, one after another.
template <class V, class T, class Sink>
void encode_group_within(const T* const* tiers, const Deciding& deciding, int size, int scale, int mantissa,
                         const Sink& sink) {
    const typename V::Count cut = V::count(kWidest - mantissa);
    Within<V> within[OTARO_WIDTHS];
    for (int t = 1; t < deciding.count; ++t) within[t - 1] = Within<V>(kWidest - deciding.mantissa[t - 1]);
    with_nested<V>(scale, kWidest, [&](const auto& coder) {
        const auto decide = [&](int i) {
            typename V::I code = coder(V::load(tiers[0] + i));
            for (int t = 1; t < deciding.count; ++t) code = within[t - 1](coder(V::load(tiers[t] + i)), code);
            return V::shift_right(code, cut);
        };
        encode_blocks<V>(size, decide, sink);
    });
}

// ---- scales ---------------------------------------------------------------------------------------------------------

// A cell of E5M8 cut to kErrorWidth is the cell of the product that is scaled down as much, and its value the odd multiple
// 2 * cell + 1 of the step; both because the offset of the code is cut without a rest.
static_assert(kNestedOffset % (1 << (kWidest - kErrorWidth)) == 0, "see above");
constexpr int kErrorLow = (kNestedMin - kNestedOffset) >> (kWidest - kErrorWidth);
constexpr int kErrorHigh = (kNestedMax - kNestedOffset) >> (kWidest - kErrorWidth);

// How far below the highest candidate the scale with the least squared error lies; `first` is the byte of 2^E. A weight is
// first brought to units of 2^(E-10), which is exact but for products that underflow; the rest is the same for all groups. All numbers fit 16 bits and
// the sum of their squares 32. `kExtreme` is for large scales: there weights may lie outside the format's range, and a
// weight below zero belongs to the cell below zero even if the product underflows. Not inlined: its registers would
// burden the paths that need none of this.
template <class V, class T, bool kExtreme>
__attribute__((noinline)) int least_error(const T* weight, int size, int weights, int first) {
    using F = typename V::F;
    using S = typename V::S;
    constexpr int kLimit = 1 << kErrorUnit, kFirst = kExponentOffset << 2, kHighest = kFirst + 1;
    const F unit = V::set1(inverse_step(first, kErrorUnit));
    const S low = V::set1s(kErrorLow), high = V::set1s(kErrorHigh);
    typename V::I sum[kCandidates];
    for (int c = 0; c < kCandidates; ++c) sum[c] = V::set1i(0);
    for (int i = 0; i < size; i += 2 * V::kLanes) {
        F x[2], target[2];
        for (int h = 0; h < 2; ++h) {
            target[h] = x[h] = V::mul(V::load(weight + i + h * V::kLanes), unit);
            if (!kExtreme) continue;
            // As far as the outermost cells of all scales, for which the error stops halfway.
            x[h] = V::min(V::max(x[h], V::set1(-2 * kLimit)), V::set1(2 * kLimit - 1));
            target[h] = V::min(V::max(x[h], V::set1(-kLimit)), V::set1(kLimit - 1));
        }
        const S twice = V::muls(V::narrow(V::floor_int(target[0]), V::floor_int(target[1])), V::set1s(2));
        for (int h = 0; kExtreme && h < 2; ++h) {
            const F given = V::mul(V::load(weight + i + h * V::kLanes), V::set1(first & kScaleSign ? -1.0f : 1.0f));
            x[h] = V::select(V::less_than_zero(given), V::min(x[h], V::set1(-power_of_two(-60))), x[h]);
        }
        for (int c = 0; c < kCandidates; ++c) {
            const F factor = V::set1(inverse_step(kHighest - c, kErrorWidth) * power_of_two(1 - kErrorUnit));
            const int half = error_step(kHighest - c, kFirst);
            const S cell = V::narrow(V::floor_int(V::mul(x[0], factor)), V::floor_int(V::mul(x[1], factor)));
            const S value = V::muls(V::mins(V::maxs(cell, low), high), V::set1s(2 * half));
            sum[c] = V::add_squares(sum[c], V::subs(V::subs(twice, V::set1s(half - 1)), value));
        }
    }
    // The error with its candidate's number below it: the least of these is the first of the least, without a branch.
    constexpr int kNumber = 8;
    int64_t least = INT64_MAX;
    for (int c = 0; c < candidate_count(first); ++c) {
        // The zeros that fill a short group do not count: the middle of their unit is 1, their value half a step.
        const int zero = error_step(kHighest - c, kFirst) - 1;
        const int64_t error = V::sum(sum[c]) - (size - weights) * zero * zero;
        least = std::min(least, error * kNumber + c);
    }
    return static_cast<int>(least & (kNumber - 1));
}

struct Extent {
    uint32_t largest; // bits of the largest magnitude
    bool positive;    // it is that of a positive weight and of no negative one
};

// Compares floats by their bits, which as whole numbers have the order of the positive ones; those of negative weights with
// the sign turned. What is not finite is larger than all else.
template <class V, class T> inline Extent measure(const T* weight, int size) {
    typename V::I positive = V::set1i(0), negative = V::set1i(0);
    for (int i = 0; i < size; i += V::kLanes) {
        const typename V::I bits = V::bits(V::load(weight + i));
        positive = V::maxi(positive, bits);
        negative = V::maxi(negative, V::addi(bits, V::set1i(INT32_MIN)));
    }
    const int32_t high = V::largest(positive), low = V::largest(negative);
    return {static_cast<uint32_t>(high > low ? high : low), high > low};
}

template <class V, class T> inline int find_scale(const T* weight, int size, int weights, int scheme, Extent extent) {
    const int scale = power_scale(extent.largest), first = extent.positive ? scale | kScaleSign : scale;
    if (scheme != OTARO_NESTED || scale == 0) return scale;
    // Where the least of the factors is 0.8 no product underflows to zero.
    constexpr int kPlain = (kExponentOffset + kErrorWidth - 1) << 2;
    return first + 1 -
           (scale > kPlain ? least_error<V, T, true>(weight, size, weights, first)
                           : least_error<V, T, false>(weight, size, weights, first));
}

constexpr int kAhead = 8; // groups

// Visits groups [first, last) of weights: body(group's number, offset, weights in it, data filled up to a whole group,
// scale). Finds the scales of several groups before the first of them is encoded: within one group every step waits for the
// one before (largest magnitude, scale, codes), and only groups that do not depend on each other fill that time.
// Stops at a weight that is not finite where `findings` asks to know.
template <class V, class T, class Body>
void for_weights(const Weights& from, int64_t first, int64_t last, Findings* findings, const Body& body) {
    struct Visit {
        int64_t offset;
        int weights;
        const T* weight;
        uint32_t largest;
        uint8_t scale;
    };
    const int size = from.geometry.group_size;
    T buffer[kAhead][kMaxGroup];
    Visit visits[kAhead];
    for (int64_t start = first; start < last; start += kAhead) {
        const int64_t end = last - start < kAhead ? last : start + kAhead;
        int count = 0;
        for_groups(from.geometry, start, end, [&](int64_t group, int64_t offset, int weights) {
            const T* const weight = padded(static_cast<const T*>(from.weight) + offset, weights, size, buffer[count]);
            Visit& visit = visits[count++] = {offset, weights, weight, 0, 0};
            if (from.scale != nullptr) visit.scale = from.scale[group];
            if (from.scale != nullptr && findings == nullptr) return true;
            const Extent extent = measure<V>(weight, size);
            visit.largest = extent.largest;
            if (from.scale == nullptr) {
                visit.scale = static_cast<uint8_t>(find_scale<V>(weight, size, weights, from.format.scheme, extent));
            }
            return true;
        });
        for (int i = 0; findings != nullptr && i < count; ++i) {
            const uint32_t largest = visits[i].largest;
            if (largest >= kInfinityBits) {
                findings->not_finite = visits[i].offset + first_not_finite(visits[i].weight);
                return;
            }
            findings->below += visits[i].scale != 0 && exponent_below(largest);
            findings->above += exponent_above(largest);
        }
        for (int i = 0; i < count; ++i) {
            body(start + i, visits[i].offset, visits[i].weights, visits[i].weight, visits[i].scale);
        }
    }
}

template <class V> void scales(const ScalesJob& job, int64_t first, int64_t last) {
    with_dtype(job.from.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const auto body = [&](int64_t index, int64_t, int, const T*, uint8_t scale) { job.scale[index] = scale; };
        for_weights<V, T>(job.from, first, last, nullptr, body);
    });
}

template <class V> void encode(const EncodeJob& job, int64_t first, int64_t last, Findings& findings) {
    const int size = job.from.geometry.group_size;
    with_dtype(job.from.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const auto body = [&](int64_t index, int64_t offset, int weights, const T* weight, uint8_t scale) {
            int16_t codes[kMaxGroup];
            job.codes.scale[index] = scale;
            int16_t* const target = weights == size ? job.codes.code + offset : codes;
            encode_group<V>(weight, size, job.from.format.scheme, scale, job.mantissa,
                            [&](int i, const Block<V>& block) { V::store_codes(target + i, block); });
            if (weights < size) memcpy(job.codes.code + offset, codes, static_cast<size_t>(weights) * sizeof *codes);
        };
        for_weights<V, T>(job.from, first, last, &findings, body);
    });
}

template <class V> void pack(const PackJob& job, int64_t first, int64_t last, Findings& findings) {
    const int size = job.from.geometry.group_size;
    const otaro_planes& planes = job.planes;
    with_dtype(job.from.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const auto body = [&](int64_t index, int64_t, int, const T* weight, uint8_t scale) {
            planes.scale[index] = scale;
            encode_group<V>(weight, size, job.from.format.scheme, scale, kWidest, [&](int i, const Block<V>& block) {
                const int64_t position = index * size + i;
                uint32_t words[OTARO_BIT_PLANES];
                V::pack(block, planes.base + position / 2, words);
                for (int64_t p = 0; p < planes.bits_count; ++p) {
                    memcpy(planes.bits[p] + position / 8, &words[p], sizeof words[p]);
                }
            });
        };
        for_weights<V, T>(job.from, first, last, &findings, body);
    });
}

template <class V> void quantize(const QuantizeJob& job, int64_t first, int64_t last) {
    const int size = job.from.geometry.group_size, mantissa = job.mantissa;
    const Deciding& deciding = job.deciding;
    const bool tiered = deciding.count > 1 || deciding.weight[0] != job.from.weight;
    with_dtype(job.from.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const auto body = [&](int64_t, int64_t offset, int weights, const T* weight, uint8_t scale) {
            T values[kMaxGroup];
            T* const result = static_cast<T*>(job.value) + offset;
            T* const target = weights == size ? result : values;
            const auto encode = [&](const auto& decoder) {
                const auto store = [&](int i, const Block<V>& block) {
                    for (int v = 0; v < Block<V>::kParts; ++v) {
                        V::store(target + i + v * V::kLanes, decoder(block.part[v]));
                    }
                };
                if (!tiered) return encode_group<V>(weight, size, job.from.format.scheme, scale, mantissa, store);
                T buffer[OTARO_WIDTHS + 1][kMaxGroup];
                const T* tiers[OTARO_WIDTHS + 1];
                for (int t = 0; t < deciding.count; ++t) {
                    tiers[t] = padded(static_cast<const T*>(deciding.weight[t]) + offset, weights, size, buffer[t]);
                }
                encode_group_within<V>(tiers, deciding, size, scale, mantissa, store);
            };
            if (job.from.format.scheme == OTARO_NESTED) {
                encode(NestedDecoder<V>(scale, mantissa));
            } else {
                encode(SignDecoder<V>(scale, mantissa));
            }
            if (weights < size) memcpy(result, values, static_cast<size_t>(weights) * sizeof(T));
        };
        for_weights<V, T>(job.from, first, last, nullptr, body);
    });
}

} // namespace
} // namespace otaro
