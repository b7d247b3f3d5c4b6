// The engine with AVX2. Its multiplication of bytes adds two products into 16 bits and saturates there, so codes have at
// most 7 bits: 2 * 127 * 127 fits.

#include "engine_kernels.h"

#if defined(__x86_64__)

#    include "vectors_avx2.h"

#    include "simd_product.h"

#    include "simd_cache.h"

namespace otaro {
namespace {

struct Avx2Dot : Avx2 {
    using Vectors = Avx2;
    using B = __m256i;
    static constexpr int kBytes = 32, kCodeBits = 7, kProductBatch = 4, kFineBatch = 4;
    static constexpr int kTilesAtOnce = 2;
    static constexpr int tiles_of_one(int planes) { return planes == 0 ? 4 : planes <= 3 ? 2 : 1; }
    static constexpr bool kWords = true;

    static B load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store_bytes(uint8_t* p, B a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
    static void store_low(int8_t* p, I a) {
        const I order = _mm256_set1_epi32(0x0c080400);
        const I low = _mm256_shuffle_epi8(a, order);
        const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), both);
    }
    static inline __attribute__((always_inline)) void prefetch(const uint8_t* p) {
        _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
    }

    // Words are shifted, as there are no shifts of bytes; the mask takes away what came from the other byte.
    template <int kShift> static B shift(B a) {
        if constexpr (kShift > 0) return _mm256_srli_epi16(a, kShift);
        if constexpr (kShift < 0) return _mm256_slli_epi16(a, -kShift);
        return a;
    }
    template <int kShift, int kMask> static B take(B a) {
        return _mm256_and_si256(shift<kShift>(a), _mm256_set1_epi8(static_cast<char>(kMask)));
    }
    template <int kShift, int kMask> static B put(B a, B b) { return _mm256_or_si256(b, take<kShift, kMask>(a)); }
    template <int kShift> static I up(I a) { return _mm256_slli_epi32(a, kShift); }

    static B four(const void* p) {
        int32_t bytes;
        memcpy(&bytes, p, sizeof bytes);
        return _mm256_set1_epi32(bytes);
    }
    static I dot(I sum, B codes, B x) {
        const __m256i pairs = _mm256_maddubs_epi16(codes, x);
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }

    static constexpr int words_from(int) { return 1; }
    template <int kHalf> static B words(B code) {
        return kHalf == 0 ? _mm256_and_si256(code, _mm256_set1_epi16(0xff)) : _mm256_srli_epi16(code, 8);
    }
    template <int kHalf> static B words(B top, B low) {
        const B doubled = _mm256_and_si256(shift<kHalf == 0 ? -1 : 7>(top), _mm256_set1_epi16(0x1fe));
        return _mm256_or_si256(doubled, words<kHalf>(low));
    }
    static void store_words(int16_t* p, I a) {
        const I mixed = _mm256_shuffle_epi8(a, _mm256_set1_epi64x(0x0d0c050409080100));
        const __m128i both = _mm_unpacklo_epi64(_mm256_castsi256_si128(mixed), _mm256_extracti128_si256(mixed, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), both);
    }
    static I dot_words(I sum, B words, B x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(words, x)); }

    static F scales(const uint8_t* scale) {
        const I bytes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(scale)));
        // The byte's own sign fills the upper bits: the float's sign is kept, the exponent and the mantissa.
        return from_bits(_mm256_and_si256(_mm256_slli_epi32(bytes, 21), set1i(static_cast<int>(0x8fe00000u))));
    }
};

} // namespace

const EngineKernels* const engine_kernels_avx2 = &kEngineKernels<Avx2Dot>;

} // namespace otaro

#else

namespace otaro {
const EngineKernels* const engine_kernels_avx2 = nullptr;
}

#endif
