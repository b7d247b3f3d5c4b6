// The engine with AVX-512 and its dot products (VNNI).

#include "engine_kernels.h"

#if defined(__x86_64__)

#    include "vectors_avx512.h"

#    include "simd_product.h"

#    include "simd_cache.h"

namespace otaro {
namespace {

struct Avx512Dot : Avx512 {
    using Vectors = Avx512;
    using B = __m512i;
    static constexpr int kBytes = 64, kCodeBits = 8, kProductBatch = 8, kFineBatch = 8;
    static constexpr int kTilesAtOnce = 2;
    static constexpr int tiles_of_one(int planes) { return planes <= 1 ? 4 : 2; }
    static constexpr bool kWords = true;

    static B load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static void store_bytes(uint8_t* p, B a) { _mm512_storeu_si512(p, a); }
    static void store_low(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
    static inline __attribute__((always_inline)) void prefetch(const uint8_t* p) {
        _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
    }

    // Words are shifted, as there are no shifts of bytes; the mask takes away what came from the other byte.
    template <int kShift> static B shift(B a) {
        if constexpr (kShift > 0) return _mm512_srli_epi16(a, kShift);
        if constexpr (kShift < 0) return _mm512_slli_epi16(a, -kShift);
        return a;
    }
    template <int kShift, int kMask> static B take(B a) {
        return _mm512_and_si512(shift<kShift>(a), _mm512_set1_epi8(static_cast<char>(kMask)));
    }
    template <int kShift, int kMask> static B put(B a, B b) {
        constexpr int kAndOr = 0xf8; // first | (second & third)
        return _mm512_ternarylogic_epi32(b, shift<kShift>(a), _mm512_set1_epi8(static_cast<char>(kMask)), kAndOr);
    }
    template <int kShift> static I up(I a) { return _mm512_slli_epi32(a, kShift); }

    static B four(const void* p) {
        int32_t bytes;
        memcpy(&bytes, p, sizeof bytes);
        return _mm512_set1_epi32(bytes);
    }
    static I dot(I sum, B codes, B x) { return _mm512_dpbusd_epi32(sum, codes, x); }

    // Only a code of 9 bits, which would take four dot products, and only where there are enough to save.
    static constexpr int words_from(int bits) { return bits > 8 ? 2 : 1 << 16; }
    template <int kHalf> static B words(B code) {
        return kHalf == 0 ? _mm512_and_si512(code, _mm512_set1_epi16(0xff)) : _mm512_srli_epi16(code, 8);
    }
    template <int kHalf> static B words(B top, B low) {
        constexpr int kSelect = 0xca; // first ? second : third
        return _mm512_ternarylogic_epi32(_mm512_set1_epi16(0x1fe), shift<kHalf == 0 ? -1 : 7>(top),
                                         shift<kHalf == 0 ? 0 : 8>(low), kSelect);
    }
    static void store_words(int16_t* p, I a) {
        const I mixed = _mm512_shuffle_epi32(a, _MM_PERM_DBCA);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(mixed));
    }
    static I dot_words(I sum, B words, B x) { return _mm512_dpwssd_epi32(sum, words, x); }

    static F scales(const uint8_t* scale) {
        const I bytes = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scale)));
        // The byte's own sign fills the upper bits: the float's sign is kept, the exponent and the mantissa.
        return from_bits(_mm512_and_si512(_mm512_slli_epi32(bytes, 21), set1i(static_cast<int>(0x8fe00000u))));
    }
};

} // namespace

const EngineKernels* const engine_kernels_avx512 = &kEngineKernels<Avx512Dot>;

} // namespace otaro

#else

namespace otaro {
const EngineKernels* const engine_kernels_avx512 = nullptr;
}

#endif
