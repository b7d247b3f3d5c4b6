// Vectors of 16 lanes: AVX-512 F, BW, VL, DQ. Its mask registers are bit planes: a test of one bit of 32 codes yields
// their plane's word, and a word selects the codes that get a bit.
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace otaro {
namespace {

struct Avx512 {
    using F = __m512;
    using I = __m512i;
    using S = __m512i;
    using Mask = __mmask16;
    using Count = __m128i;
    static constexpr int kLanes = 16;

    static F set1(float value) { return _mm512_set1_ps(value); }
    static I set1i(int value) { return _mm512_set1_epi32(value); }
    static S set1s(int value) { return _mm512_set1_epi16(static_cast<short>(value)); }
    static Count count(int value) { return _mm_cvtsi32_si128(value); }

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static F load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static F load(const Brain* p) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
    static void store(Half* p, F a) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    }
    static void store(Brain* p, F a) {
        const I bits = _mm512_castps_si512(a);
        const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), set1i(1));
        const I rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, set1i(0x7fff)), odd), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
    }

    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F abs(F a) { return _mm512_and_ps(a, _mm512_castsi512_ps(set1i(0x7fffffff))); }
    static I bits(F a) { return _mm512_castps_si512(a); }
    static F from_bits(I a) { return _mm512_castsi512_ps(a); }
    static void storei(int32_t* p, I a) { _mm512_storeu_si512(p, a); }
    static Mask less_than_zero(F a) { return _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_LT_OQ); }
    static uint32_t lanes(Mask mask) { return mask; } // a bit each
    static F select(Mask mask, F yes, F no) { return _mm512_mask_blend_ps(mask, no, yes); }
    static I keep(Mask mask, I a) { return _mm512_maskz_mov_epi32(mask, a); }
    static F negate_where(F a, I nonzero) {
        const I sign = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(nonzero, nonzero), set1i(INT32_MIN));
        return _mm512_xor_ps(a, _mm512_castsi512_ps(sign));
    }

    static I floor_int(F a) { return _mm512_cvt_roundps_epi32(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
    static I trunc_int(F a) { return _mm512_cvttps_epi32(a); }
    static I round_int(F a) { return _mm512_cvtps_epi32(a); }
    static F to_float(I a) { return _mm512_cvtepi32_ps(a); }

    static I addi(I a, I b) { return _mm512_add_epi32(a, b); }
    static I andi(I a, I b) { return _mm512_and_si512(a, b); }
    static I ori(I a, I b) { return _mm512_or_si512(a, b); }
    static I mini(I a, I b) { return _mm512_min_epi32(a, b); }
    static I maxi(I a, I b) { return _mm512_max_epi32(a, b); }
    static I shift_right(I a, Count n) { return _mm512_sra_epi32(a, n); }
    static I shift_left(I a, Count n) { return _mm512_sll_epi32(a, n); }

    static int32_t largest(I a) { return _mm512_reduce_max_epi32(a); }
    static float sum(F a) { return _mm512_reduce_add_ps(a); }
    static int32_t sum(I a) { return _mm512_reduce_add_epi32(a); }

    static S narrow(I a, I b) { return _mm512_packs_epi32(a, b); }
    static S subs(S a, S b) { return _mm512_sub_epi16(a, b); }
    static S muls(S a, S b) { return _mm512_mullo_epi16(a, b); }
    static S mins(S a, S b) { return _mm512_min_epi16(a, b); }
    static S maxs(S a, S b) { return _mm512_max_epi16(a, b); }
    static I add_squares(I sum, S a) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, a)); }

    static void load_codes(const int16_t* code, Block<Avx512>& block) { widen(_mm512_loadu_si512(code), block); }
    static void store_codes(int16_t* code, const Block<Avx512>& block) { _mm512_storeu_si512(code, narrow(block)); }

    static void pack(const Block<Avx512>& block, uint8_t* base, uint32_t* words) {
        const I code = narrow(block);
        // The top four bits of two neighbours side by side: earlier + 16 * later.
        const I pairs = _mm512_madd_epi16(_mm512_srli_epi16(code, 5), set1i(16 << 16 | 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(base), _mm512_cvtepi32_epi8(pairs));
        for (int p = 0; p < OTARO_BIT_PLANES; ++p) {
            const I bit = _mm512_set1_epi16(static_cast<short>(1 << (OTARO_BIT_PLANES - 1 - p)));
            words[p] = _mm512_test_epi16_mask(code, bit);
        }
    }

    template <int kPlanes>
    static void unpack(const uint8_t* base, uint8_t* const* planes, int64_t offset, Block<Avx512>& block) {
        const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(base));
        // Each byte in 16 bits of its own, then its upper half moved up to a byte of its own, then each byte in 16 bits.
        const __m256i spread = _mm256_cvtepu8_epi16(packed);
        const __m256i nibbles =
            _mm256_and_si256(_mm256_or_si256(spread, _mm256_slli_epi16(spread, 4)), _mm256_set1_epi8(15));
        I code = _mm512_slli_epi16(_mm512_cvtepu8_epi16(nibbles), kPlanes);
        for (int p = 0; p < kPlanes; ++p) {
            uint32_t word;
            memcpy(&word, planes[p] + offset, sizeof word);
            const I bit = _mm512_set1_epi16(static_cast<short>(1 << (kPlanes - 1 - p)));
            code = _mm512_mask_add_epi16(code, word, code, bit); // the bit is still clear, so adding sets it
        }
        widen(code, block);
    }

  private:
    static void widen(I code, Block<Avx512>& block) {
        block.part[0] = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(code));
        block.part[1] = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(code, 1));
    }

    static I narrow(const Block<Avx512>& block) {
        const I order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7); // packs works within 128-bit quarters
        return _mm512_permutexvar_epi64(order, _mm512_packs_epi32(block.part[0], block.part[1]));
    }
};

} // namespace
} // namespace otaro
