// Products of a packed matrix with a few quantised activations, over a small vector abstraction (see engine_kernels.h).
//
// A vector class V, in addition to what simd.h lists, has
//     B                 a vector of kBytes bytes, 4 for each of kBytes / 4 rows
//     kCodeBits         the widest code a byte may hold: 8, or 7 where the instructions take it as signed or saturate
//     kProductBatch     activations multiplied at a time before registers run out
//     load_bytes, store_bytes
//     store_low(p, integers)       the lowest byte of each
//     take<shift, mask>(a)         (a >> shift) & mask of each byte, shift < 0 to the left
//     put<shift, mask>(a, b)       b | (a >> shift) & mask
//     four(p)                      the four bytes at p for each row
//     dot(sum, codes, x)           sum + codes * four activations, in each row
//     kWords            whether it has what follows:
//     words_from(bits)             the fewest activations that are multiplied with words, by the bits of a code
//     words<half>(code), words<half>(top, low)   each row's codes of columns 0 and 2 (half 0) or 1 and 3 (half 1) as
//                                  words: the byte itself, or the byte and one bit below it
//     dot_words(sum, words, x)     sum + words * two activations of 16 bits, in each row
//     store_words(p, integers)     the lower halves of four after four, in the order 0 2 1 3
//     kTilesAtOnce      unpacked tiles multiplied side by side, so that an activation is loaded once for all of them
//     tiles_of_one(planes)         tiles multiplied side by side with a single activation: they are read at once
//     scales(scale)     scale_float of the rows
//
// A code wider than kCodeBits is split: its top goes into one byte and the rest ("low") into another, multiplied apart.
// A step costs two instructions a bit plane (shift, merge), one or two for the base, and one dot product for every
// activation and part of the code. With activations of 16 bits (two parts) codes may instead become words of 16 bits: a
// few instructions a step more, but then only two dot products for each activation, whatever the code.
#pragma once

#include <algorithm>

#include "engine_kernels.h"
#include "simd.h"

namespace otaro {
namespace {

template <int N, class Body> inline __attribute__((always_inline)) void repeat(const Body& body) {
    if constexpr (N > 0) {
        repeat<N - 1>(body);
        body(Number<N - 1>());
    }
}

// How a code of 4 + kPlanes bits is split over bytes.
template <class V, int kPlanes, bool kWords> struct Split {
    static constexpr int kCodeBits = kWords ? 8 : V::kCodeBits;
    static constexpr int kTopPlanes = kPlanes + 4 <= kCodeBits ? kPlanes : kCodeBits - 4;
    static constexpr int kLow = kPlanes - kTopPlanes; // bits in the second byte
};

// Steps of a tile as they are stored. A step comes in kParts vectors: the top, then the low, or the words of its halves.
// kTiles of them are read side by side.
template <class V, int kPlanes, bool kWords, int kTiles = 1> class PackedSteps {
    using Parts = Split<V, kPlanes, kWords>;

  public:
    static constexpr int kParts = kWords || Parts::kLow > 0 ? 2 : 1;

    PackedSteps() = default;
    PackedSteps(const Tiles& tiles, int64_t tile, int part) {
        const int64_t block = tile * tiles.blocks;
        base_ = tiles.base + block * kBaseBytes + part * V::kBytes;
        for (int p = 0; p < kPlanes; ++p) bits_[p] = tiles.bits[p] + block * kPlaneBytes + part * V::kBytes;
    }

    inline __attribute__((always_inline)) void start_block() {
        repeat<4>([&](auto v) __attribute__((always_inline)) {
            vectors_[v.value] = V::load_bytes(base_ + v.value * kStepBytes);
            V::prefetch(base_ + kBaseAhead * kBaseBytes + v.value * kStepBytes);
        });
        base_ += kBaseBytes;
        repeat<kPlanes>([&](auto p) __attribute__((always_inline)) {
            planes_[p.value] = V::load_bytes(bits_[p.value]);
            V::prefetch(bits_[p.value] + kPlanesAhead * kPlaneBytes);
            bits_[p.value] += kPlaneBytes;
        });
    }

    // Calls use(part, number of the part) for each.
    template <int kStep, class Use> inline __attribute__((always_inline)) void parts(const Use& use) const {
        if constexpr (!kWords) {
            use(top<kStep>(), Number<0>());
            if constexpr (Parts::kLow > 0) use(low<kStep>(), Number<1>());
        } else if constexpr (Parts::kLow == 0) {
            const typename V::B code = top<kStep>();
            use(V::template words<0>(code), Number<0>());
            use(V::template words<1>(code), Number<1>());
        } else {
            const typename V::B code = top<kStep>(), bit = low<kStep>();
            use(V::template words<0>(code, bit), Number<0>());
            use(V::template words<1>(code, bit), Number<1>());
        }
    }

  private:
    template <int kStep> inline __attribute__((always_inline)) typename V::B top() const {
        constexpr int kUp = Parts::kTopPlanes;
        typename V::B code = V::template take<kStep / 4 * 4 - kUp, 15 << kUp>(vectors_[kStep % 4]);
        repeat<kUp>([&](auto p) {
            constexpr int kPlace = kUp - 1 - decltype(p)::value;
            code = V::template put<kStep - kPlace, 1 << kPlace>(planes_[p.value], code);
        });
        return code;
    }

    template <int kStep> inline __attribute__((always_inline)) typename V::B low() const {
        constexpr int kFirst = Parts::kTopPlanes, kPlace = Parts::kLow - 1;
        typename V::B code = V::template take<kStep - kPlace, 1 << kPlace>(planes_[kFirst]);
        if constexpr (Parts::kLow == 2) code = V::template put<kStep, 1>(planes_[kFirst + 1], code);
        return code;
    }

    // Blocks, into the second-level cache. With four tiles fewer would be of a neighbour that is being read already.
    static constexpr int kBaseAhead = kTiles < 4 ? 32 : 64, kPlanesAhead = 64;
    const uint8_t* base_;
    const uint8_t* bits_[kPlanes + 1];
    typename V::B vectors_[4], planes_[kPlanes + 1];
};

// Steps of a tile unpacked beforehand: 64 bytes for each part of each step.
template <class V, int kPlanes, bool kWords> class UnpackedSteps {
    using Packed = PackedSteps<V, kPlanes, kWords>;

  public:
    UnpackedSteps() : next_(nullptr) {}
    UnpackedSteps(const uint8_t* scratch, int part) : next_(scratch + part * V::kBytes - kBlockBytes) {}

    inline __attribute__((always_inline)) void start_block() { next_ += kBlockBytes; }
    template <int kStep, class Use> inline __attribute__((always_inline)) void parts(const Use& use) const {
        repeat<Packed::kParts>([&](auto p) { use(V::load_bytes(next_ + place(kStep, p.value)), p); });
    }

    static void unpack(const Tiles& tiles, int64_t tile, uint8_t* scratch) {
        for (int part = 0; part < kStepBytes / V::kBytes; ++part) {
            Packed steps(tiles, tile, part);
            uint8_t* to = scratch + part * V::kBytes;
            for (int64_t block = 0; block < tiles.blocks; ++block) {
                steps.start_block();
                repeat<kSteps>([&](auto step) {
                    constexpr int kStep = decltype(step)::value;
                    steps.template parts<kStep>(
                        [&](typename V::B code, auto p) { V::store_bytes(to + place(kStep, p.value), code); });
                });
                to += kBlockBytes;
            }
        }
    }

  private:
    static constexpr int place(int step, int part) { return (step * Packed::kParts + part) * kStepBytes; }
    static constexpr int kBlockBytes = kSteps * Packed::kParts * kStepBytes;
    const uint8_t* next_;
};

// The rows of one vector, in kTiles tiles from `tile` on, times kBatch rows of activations from `row` on.
template <class V, int kPlanes, bool kFine, bool kWords, int kBatch, class Steps, size_t kTiles>
void multiply_rows(const Product& product, const Steps (&begin)[kTiles], int64_t tile, int part, int64_t row) {
    Steps steps[kTiles]; // copies, so that what they hold stays in registers
    for (size_t t = 0; t < kTiles; ++t) steps[t] = begin[t];
    using I = typename V::I;
    using F = typename V::F;
    constexpr int kLow = kWords ? 0 : Split<V, kPlanes, kWords>::kLow;
    constexpr int kParts = kWords || kLow > 0 ? 2 : 1;
    constexpr bool kTwoChains = kWords && kBatch <= 4; // few sums would wait for each other
    constexpr int kRows = V::kBytes / kStepColumns;
    const Tiles& tiles = *product.weight;
    const Activations& x = *product.x;
    const int64_t first = activation_place(x, row, 0);
    // A single row beside others is not multiplied with several tiles.
    const int64_t next_block = kBlockColumns * (kBatch > 1   ? kRowsTogether
                                                : kTiles > 1 ? rows_together(1)
                                                             : x.together);
    const int8_t* const coarse = x.coarse + first;
    const int8_t* const fine = kFine ? x.fine + first : nullptr;
    const int16_t* const words = kWords ? x.words + first : nullptr;
    const float* const scale = x.scale + row * x.stride;
    const float* const offset = x.offset + row * x.stride;
    const int64_t tile_groups = tiles.groups * kTileRows;
    const uint8_t* scales = tiles.scale + tile * tile_groups + part * kRows;
    F sum[kTiles][kBatch], group_scale[kTiles];
    for (size_t t = 0; t < kTiles; ++t) {
        group_scale[t] = V::set1(0);
        for (int b = 0; b < kBatch; ++b) sum[t][b] = V::set1(0);
    }
    int left = 0; // spans of the group at hand
    for (int64_t span = 0, block = 0; span < x.spans; ++span) {
        if (left-- == 0) {
            for (size_t t = 0; t < kTiles; ++t)
                group_scale[t] = V::scales(scales + static_cast<int64_t>(t) * tile_groups);
            scales += kTileRows;
            left = tiles.group_blocks / x.span_blocks - 1;
        }
        // By part of the code (top, low) and of the activation (coarse, fine); of words, by half, the first only.
        I sums[kTiles][2][2][kBatch];
        for (size_t t = 0; t < kTiles; ++t) {
            I(*const all)[2][kBatch] = sums[t];
            for (int b = 0; b < kBatch; ++b) all[0][0][b] = all[0][1][b] = all[1][0][b] = all[1][1][b] = V::set1i(0);
        }
        for (const int64_t end = block + x.span_blocks; block < end; ++block) {
            repeat<static_cast<int>(kTiles)>([&](auto t)
                                                 __attribute__((always_inline)) { steps[t.value].start_block(); });
            repeat<kSteps>([&](auto step) __attribute__((always_inline)) {
                constexpr int kStep = decltype(step)::value;
                typename V::B codes[kTiles][kParts];
                repeat<static_cast<int>(kTiles)>([&](auto t) __attribute__((always_inline)) {
                    steps[t.value].template parts<kStep>([&](typename V::B code, auto p) __attribute__((
                                                             always_inline)) { codes[t.value][p.value] = code; });
                });
                repeat<kBatch>([&](auto number) __attribute__((always_inline)) {
                    constexpr int b = decltype(number)::value;
                    const int64_t at = block * next_block + b * kBlockColumns + kStep * kStepColumns;
                    if constexpr (kWords) {
                        repeat<kParts>([&](auto p) __attribute__((always_inline)) {
                            const typename V::B two = V::four(words + at + 2 * p.value);
                            repeat<kTiles>([&](auto t) __attribute__((always_inline)) {
                                I& to = sums[t.value][kTwoChains ? p.value : 0][0][b];
                                to = V::dot_words(to, codes[t.value][p.value], two);
                            });
                        });
                    } else {
                        const auto dots = [&](auto which, const int8_t* from) __attribute__((always_inline)) {
                            const typename V::B four = V::four(from + at);
                            repeat<kTiles * kParts>([&](auto n) __attribute__((always_inline)) {
                                constexpr int t = decltype(n)::value / kParts, p = decltype(n)::value % kParts;
                                I& to = sums[t][p][which.value][b];
                                to = V::dot(to, codes[t][p], four);
                            });
                        };
                        dots(Number<0>(), coarse);
                        if constexpr (kFine) dots(Number<1>(), fine);
                    }
                });
            });
        }
        for (int b = 0; b < kBatch; ++b) {
            const F span_scale = V::set1(scale[b * x.stride + span]);
            const F span_offset = V::set1(offset[b * x.stride + span]);
            for (size_t t = 0; t < kTiles; ++t) {
                I total = sums[t][0][0][b];
                if constexpr (kTwoChains) total = V::addi(total, sums[t][1][0][b]);
                if constexpr (kLow > 0) total = V::addi(V::template up<kLow>(total), sums[t][1][0][b]);
                if constexpr (kFine && !kWords) {
                    I rest = sums[t][0][1][b];
                    if constexpr (kLow > 0) rest = V::addi(V::template up<kLow>(rest), sums[t][1][1][b]);
                    total = V::addi(V::template up<8>(total), rest);
                }
                const F value = V::fma(V::to_float(total), span_scale, span_offset);
                sum[t][b] = V::fma(group_scale[t], value, sum[t][b]);
            }
        }
    }
    for (size_t t = 0; t < kTiles; ++t) {
        const int64_t first = (tile + static_cast<int64_t>(t)) * kTileRows + part * kRows;
        const int rows = static_cast<int>(tiles.rows - first < kRows ? tiles.rows - first : kRows);
        for (int b = 0; b < kBatch; ++b) {
            float* const y = product.y + (row + b) * product.y_stride + first;
            if (rows == kRows) {
                F value = sum[t][b];
                if (product.bias != nullptr) value = V::add(value, V::load(product.bias + first));
                V::store(y, product.add ? V::add(V::load(y), value) : value);
                continue;
            }
            float values[kRows];
            V::store(values, sum[t][b]);
            for (int r = 0; r < rows; ++r) {
                float value = values[r];
                if (product.bias != nullptr) value += product.bias[first + r];
                y[r] = product.add ? y[r] + value : value;
            }
        }
    }
}

// Whether kBatch activations of 16 bits are multiplied with words.
template <class V, int kPlanes, bool kFine, int kBatch> constexpr bool uses_words() {
    if constexpr (kFine && V::kWords) return kBatch >= V::words_from(4 + kPlanes);
    return false;
}

// One tile with the rows of activations from `row` on, as many at a time as registers allow, straight from the planes.
template <class V, int kPlanes, bool kFine> void multiply_packed(const Product& product, int64_t tile, int64_t row) {
    constexpr int kMost = kFine ? V::kFineBatch : V::kProductBatch;
    const int64_t first = row;
    for (int part = 0; part < kStepBytes / V::kBytes; ++part) {
        if (tile * kTileRows + part * (V::kBytes / kStepColumns) >= product.weight->rows) return;
        row = first;
        const auto rows = [&](auto count) {
            constexpr int kCount = decltype(count)::value;
            if constexpr (kCount <= kMost) {
                constexpr bool kWords = uses_words<V, kPlanes, kFine, kCount>();
                for (; row + kCount <= product.batch; row += kCount) {
                    PackedSteps<V, kPlanes, kWords> steps[1] = {{*product.weight, tile, part}};
                    multiply_rows<V, kPlanes, kFine, kWords, kCount>(product, steps, tile, part, row);
                }
            }
        };
        rows(Number<8>());
        rows(Number<6>());
        rows(Number<4>());
        rows(Number<3>());
        rows(Number<2>());
        rows(Number<1>());
    }
}

// kTiles tiles with one row of activations, side by side: each is a stream of its own through memory, and more streams
// have more reads under way.
template <class V, int kPlanes, bool kFine, int kTiles> void multiply_one(const Product& product, int64_t tile) {
    constexpr bool kWords = uses_words<V, kPlanes, kFine, 1>();
    for (int part = 0; part < kStepBytes / V::kBytes; ++part) {
        PackedSteps<V, kPlanes, kWords, kTiles> steps[kTiles];
        for (int t = 0; t < kTiles; ++t) steps[t] = {*product.weight, tile + t, part};
        multiply_rows<V, kPlanes, kFine, kWords, 1>(product, steps, tile, part, 0);
    }
}

// kTilesAtOnce tiles with all rows of activations, unpacked once; the last few rows straight from the planes.
template <class V, int kPlanes, bool kFine>
void multiply_unpacked(const Product& product, int64_t tile, uint8_t* scratch) {
    constexpr bool kWords = kFine && V::kWords;
    constexpr int kMost = kFine ? V::kFineBatch : V::kProductBatch;
    using Steps = UnpackedSteps<V, kPlanes, kWords>;
    const int64_t size = unpacked_bytes(*product.weight), whole = product.batch / kMost * kMost;
    for (int t = 0; t < V::kTilesAtOnce; ++t) {
        Steps::unpack(*product.weight, tile + t, scratch + t * size);
        multiply_packed<V, kPlanes, kFine>(product, tile + t, whole);
    }
    for (int part = 0; part < kStepBytes / V::kBytes; ++part) {
        if (tile * kTileRows + part * (V::kBytes / kStepColumns) >= product.weight->rows) return;
        for (int64_t row = 0; row < whole; row += kMost) {
            Steps steps[V::kTilesAtOnce];
            for (int t = 0; t < V::kTilesAtOnce; ++t) steps[t] = {scratch + t * size, part};
            multiply_rows<V, kPlanes, kFine, kWords, kMost>(product, steps, tile, part, row);
        }
    }
}

template <class V, int kPlanes, bool kFine>
void multiply_tiles(const Product& product, int64_t first, int64_t last, uint8_t* scratch) {
    int64_t tile = first;
    if (product.batch >= kUnpackFrom) {
        for (; tile + V::kTilesAtOnce <= last; tile += V::kTilesAtOnce) {
            multiply_unpacked<V, kPlanes, kFine>(product, tile, scratch);
        }
    }
    constexpr int kTiles = V::tiles_of_one(kPlanes);
    static_assert(kTiles <= kMostTiles, "ranges are multiples of kMostTiles");
    if constexpr (kTiles > 1) {
        const int64_t whole = product.batch == 1 ? std::min(last, product.weight->rows / kTileRows) : 0;
        for (; tile + kTiles <= whole; tile += kTiles) multiply_one<V, kPlanes, kFine, kTiles>(product, tile);
    }
    for (; tile < last; ++tile) multiply_packed<V, kPlanes, kFine>(product, tile, 0);
}

template <class V> void multiply(const Product& product, int64_t first, int64_t last, uint8_t* scratch) {
    with_planes(product.mantissa - kNarrowest, [&](auto planes) {
        constexpr int kPlanes = decltype(planes)::value;
        if (product.x->fine != nullptr) {
            multiply_tiles<V, kPlanes, true>(product, first, last, scratch);
        } else {
            multiply_tiles<V, kPlanes, false>(product, first, last, scratch);
        }
    });
}

} // namespace
} // namespace otaro
