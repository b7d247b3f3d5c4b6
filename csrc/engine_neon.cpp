// The engine with Advanced SIMD. Its dot product takes both sides as signed, so codes have at most 7 bits; a processor
// without it multiplies and adds in three steps.

#include "engine_kernels.h"

#if defined(__aarch64__)

#    include "vectors_neon.h"

#    include "simd_product.h"

#    include "simd_cache.h"

namespace otaro {
namespace {

struct NeonDot : Neon {
    using Vectors = Neon;
    using B = uint8x16_t;
    static constexpr int kBytes = 16, kCodeBits = 7, kProductBatch = 8, kFineBatch = 4;
    static constexpr int kTilesAtOnce = 1;
    static constexpr int tiles_of_one(int) { return 1; }
    static constexpr bool kWords = false; // they take four weights where a dot product takes sixteen

    static B load_bytes(const uint8_t* p) { return vld1q_u8(p); }
    static void store_bytes(uint8_t* p, B a) { vst1q_u8(p, a); }
    static void store_low(int8_t* p, I a) {
        const int16x4_t words = vmovn_s32(a);
        const int32x2_t low = vreinterpret_s32_s8(vmovn_s16(vcombine_s16(words, words)));
        memcpy(p, &low, sizeof(int32_t));
    }
    static inline __attribute__((always_inline)) void prefetch(const uint8_t* p) { __builtin_prefetch(p); }

    template <int kShift> static B shift(B a) {
        if constexpr (kShift > 0) return vshrq_n_u8(a, kShift);
        if constexpr (kShift < 0) return vshlq_n_u8(a, -kShift);
        return a;
    }
    template <int kShift, int kMask> static B take(B a) { return vandq_u8(shift<kShift>(a), vdupq_n_u8(kMask)); }
    template <int kShift, int kMask> static B put(B a, B b) { return vorrq_u8(b, take<kShift, kMask>(a)); }
    template <int kShift> static I up(I a) { return vshlq_n_s32(a, kShift); }

    static B four(const void* p) {
        int32_t bytes;
        memcpy(&bytes, p, sizeof bytes);
        return vreinterpretq_u8_s32(vdupq_n_s32(bytes));
    }
    static I dot(I sum, B codes, B x) {
        const int8x16_t all = vreinterpretq_s8_u8(x), signed_codes = vreinterpretq_s8_u8(codes);
#    if defined(__ARM_FEATURE_DOTPROD)
        return vdotq_s32(sum, signed_codes, all);
#    else
        const int16x8_t low = vmull_s8(vget_low_s8(signed_codes), vget_low_s8(all));
        const int16x8_t high = vmull_high_s8(signed_codes, all);
        return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#    endif
    }

    static F scales(const uint8_t* scale) {
        int32_t bytes;
        memcpy(&bytes, scale, sizeof bytes);
        const int8x8_t four = vreinterpret_s8_s32(vdup_n_s32(bytes));
        const I wide = vmovl_s16(vget_low_s16(vmovl_s8(four)));
        // The byte's own sign fills the upper bits: the float's sign is kept, the exponent and the mantissa.
        return from_bits(vandq_s32(vshlq_n_s32(wide, 21), set1i(static_cast<int>(0x8fe00000u))));
    }
};

} // namespace

const EngineKernels* const engine_kernels_neon = &kEngineKernels<NeonDot>;

} // namespace otaro

#else

namespace otaro {
const EngineKernels* const engine_kernels_neon = nullptr;
}

#endif
