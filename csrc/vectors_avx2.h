// Vectors of 8 lanes: AVX2, FMA, F16C.
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace otaro {
namespace {

struct Avx2 {
    using F = __m256;
    using I = __m256i;
    using S = __m256i;
    using Mask = __m256;
    using Count = __m128i;
    static constexpr int kLanes = 8;

    static F set1(float value) { return _mm256_set1_ps(value); }
    static I set1i(int value) { return _mm256_set1_epi32(value); }
    static S set1s(int value) { return _mm256_set1_epi16(static_cast<short>(value)); }
    static Count count(int value) { return _mm_cvtsi32_si128(value); }

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static F load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static F load(const Brain* p) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
    static void store(Half* p, F a) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    }
    static void store(Brain* p, F a) {
        const I bits = _mm256_castps_si256(a);
        const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), set1i(1));
        const I rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, set1i(0x7fff)), odd), 16);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                         _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
    }

    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F abs(F a) { return _mm256_and_ps(a, _mm256_castsi256_ps(set1i(0x7fffffff))); }
    static I bits(F a) { return _mm256_castps_si256(a); }
    static F from_bits(I a) { return _mm256_castsi256_ps(a); }
    static void storei(int32_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
    static Mask less_than_zero(F a) { return _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_LT_OQ); }
    static uint32_t lanes(Mask mask) { return static_cast<uint32_t>(_mm256_movemask_ps(mask)); } // a bit each
    static F select(Mask mask, F yes, F no) { return _mm256_blendv_ps(no, yes, mask); }
    static I keep(Mask mask, I a) { return _mm256_and_si256(_mm256_castps_si256(mask), a); }
    static F negate_where(F a, I nonzero) {
        const I zero = _mm256_cmpeq_epi32(nonzero, _mm256_setzero_si256());
        return _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_andnot_si256(zero, set1i(INT32_MIN))));
    }

    static I floor_int(F a) { return _mm256_cvtps_epi32(_mm256_floor_ps(a)); }
    static I trunc_int(F a) { return _mm256_cvttps_epi32(a); }
    static I round_int(F a) { return _mm256_cvtps_epi32(a); }
    static F to_float(I a) { return _mm256_cvtepi32_ps(a); }

    static I addi(I a, I b) { return _mm256_add_epi32(a, b); }
    static I andi(I a, I b) { return _mm256_and_si256(a, b); }
    static I ori(I a, I b) { return _mm256_or_si256(a, b); }
    static I mini(I a, I b) { return _mm256_min_epi32(a, b); }
    static I maxi(I a, I b) { return _mm256_max_epi32(a, b); }
    static I shift_right(I a, Count n) { return _mm256_sra_epi32(a, n); }
    static I shift_left(I a, Count n) { return _mm256_sll_epi32(a, n); }

    static int32_t largest(I a) {
        __m128i most = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        most = _mm_max_epi32(most, _mm_shuffle_epi32(most, _MM_SHUFFLE(1, 0, 3, 2)));
        most = _mm_max_epi32(most, _mm_shuffle_epi32(most, _MM_SHUFFLE(2, 3, 0, 1)));
        return _mm_cvtsi128_si32(most);
    }
    static float sum(F a) {
        __m128 total = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        total = _mm_add_ps(total, _mm_movehl_ps(total, total));
        return _mm_cvtss_f32(_mm_add_ss(total, _mm_movehdup_ps(total)));
    }
    static int32_t sum(I a) {
        __m128i total = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        total = _mm_add_epi32(total, _mm_shuffle_epi32(total, _MM_SHUFFLE(1, 0, 3, 2)));
        return _mm_cvtsi128_si32(_mm_add_epi32(total, _mm_shuffle_epi32(total, _MM_SHUFFLE(2, 3, 0, 1))));
    }

    static S narrow(I a, I b) { return _mm256_packs_epi32(a, b); }
    static S subs(S a, S b) { return _mm256_sub_epi16(a, b); }
    static S muls(S a, S b) { return _mm256_mullo_epi16(a, b); }
    static S mins(S a, S b) { return _mm256_min_epi16(a, b); }
    static S maxs(S a, S b) { return _mm256_max_epi16(a, b); }
    static I add_squares(I sum, S a) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, a)); }

    static void load_codes(const int16_t* code, Block<Avx2>& block) {
        for (int v = 0; v < 4; ++v) {
            block.part[v] = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(code + 8 * v)));
        }
    }
    static void store_codes(int16_t* code, const Block<Avx2>& block) {
        for (int v = 0; v < 4; v += 2) {
            const I words = _mm256_packs_epi32(block.part[v], block.part[v + 1]);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(code + 8 * v),
                                _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0)));
        }
    }

    // The packing instructions work within 128-bit halves, so the order in between is: codes 0-3, 8-11, 16-19, 24-27 in
    // the low half, 4-7, 12-15, 20-23, 28-31 in the high half.
    static void pack(const Block<Avx2>& block, uint8_t* base, uint32_t* words) {
        const I a = _mm256_packs_epi32(block.part[0], block.part[1]),
                b = _mm256_packs_epi32(block.part[2], block.part[3]);
        // The top four bits of two neighbours side by side: earlier + 16 * later.
        const I weights = set1i(16 << 16 | 1);
        const I pairs = _mm256_packs_epi32(_mm256_madd_epi16(_mm256_srli_epi16(a, 5), weights),
                                           _mm256_madd_epi16(_mm256_srli_epi16(b, 5), weights));
        const I bytes = _mm256_packus_epi16(pairs, pairs);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(base),
                         _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
        // The low five bits, each in turn moved to the top of its byte.
        const I mask = _mm256_set1_epi16(31);
        const I low = _mm256_packus_epi16(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask));
        I bits = _mm256_slli_epi16(_mm256_permutevar8x32_epi32(low, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)), 3);
        for (int p = 0; p < OTARO_BIT_PLANES; ++p) {
            words[p] = static_cast<uint32_t>(_mm256_movemask_epi8(bits));
            bits = _mm256_add_epi8(bits, bits);
        }
    }

    template <int kPlanes>
    static void unpack(const uint8_t* base, uint8_t* const* planes, int64_t offset, Block<Avx2>& block) {
        const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(base));
        const __m128i nibble = _mm_set1_epi8(15);
        const __m128i even = _mm_and_si128(packed, nibble), odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
        const I top = _mm256_setr_m128i(_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd));
        // Byte i of a word's copies holds the word's byte i / 8; one bit of it is weight i's.
        const I copies = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const I bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
        I low = _mm256_setzero_si256();
        for (int p = 0; p < kPlanes; ++p) {
            int word;
            memcpy(&word, planes[p] + offset, sizeof word);
            const I spread = _mm256_and_si256(_mm256_shuffle_epi8(set1i(word), copies), bit);
            const I place = _mm256_set1_epi8(static_cast<char>(1 << (kPlanes - 1 - p)));
            low = _mm256_or_si256(low, _mm256_and_si256(_mm256_cmpeq_epi8(spread, bit), place));
        }
        // Up to 8 bits fit a byte, and then the shift stays within it; a ninth is kept apart.
        constexpr int kKept = kPlanes < 5 ? 15 : 7;
        const I kept = _mm256_and_si256(top, _mm256_set1_epi8(kKept));
        const I bytes = _mm256_or_si256(_mm256_slli_epi16(kept, kPlanes), low);
        const __m128i halves[2] = {_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)};
        for (int h = 0; h < 2; ++h) {
            if (kPlanes < 5) {
                block.part[2 * h] = _mm256_cvtepu8_epi32(halves[h]);
                block.part[2 * h + 1] = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(halves[h], halves[h]));
            } else {
                const I ninths = _mm256_and_si256(_mm256_srli_epi16(top, 3), _mm256_set1_epi8(1));
                const __m128i ninth = h == 0 ? _mm256_castsi256_si128(ninths) : _mm256_extracti128_si256(ninths, 1);
                block.part[2 * h] = _mm256_cvtepu16_epi32(_mm_unpacklo_epi8(halves[h], ninth));
                block.part[2 * h + 1] = _mm256_cvtepu16_epi32(_mm_unpackhi_epi8(halves[h], ninth));
            }
        }
    }
};

} // namespace
} // namespace otaro
