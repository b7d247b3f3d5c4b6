// Vectors of 4 lanes: Advanced SIMD, which every 64-bit Arm processor has.
#pragma once

#include <arm_neon.h>

#include "simd.h"

namespace otaro {
namespace {

struct Neon {
    using F = float32x4_t;
    using I = int32x4_t;
    using S = int16x8_t;
    using Mask = uint32x4_t;
    using Count = int32x4_t;
    static constexpr int kLanes = 4;

    static F set1(float value) { return vdupq_n_f32(value); }
    static I set1i(int value) { return vdupq_n_s32(value); }
    static S set1s(int value) { return vdupq_n_s16(static_cast<int16_t>(value)); }
    static Count count(int value) { return vdupq_n_s32(value); }

    static F load(const float* p) { return vld1q_f32(p); }
    static F load(const Half* p) {
        return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
    }
    static F load(const Brain* p) {
        return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16));
    }
    static void store(float* p, F a) { vst1q_f32(p, a); }
    static void store(Half* p, F a) { vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(a))); }
    static void store(Brain* p, F a) {
        const uint32x4_t bits = vreinterpretq_u32_f32(a);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
        vst1_u16(reinterpret_cast<uint16_t*>(p), vshrn_n_u32(rounded, 16));
    }

    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F min(F a, F b) { return vminq_f32(a, b); }
    static F max(F a, F b) { return vmaxq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F abs(F a) { return vabsq_f32(a); }
    static I bits(F a) { return vreinterpretq_s32_f32(a); }
    static F from_bits(I a) { return vreinterpretq_f32_s32(a); }
    static void storei(int32_t* p, I a) { vst1q_s32(p, a); }
    static Mask less_than_zero(F a) { return vcltzq_f32(a); }
    static uint32_t lanes(Mask mask) { // a bit each
        const int32x4_t places = {0, 1, 2, 3};
        return vaddvq_u32(vshlq_u32(vshrq_n_u32(mask, 31), places));
    }
    static F select(Mask mask, F yes, F no) { return vbslq_f32(mask, yes, no); }
    static I keep(Mask mask, I a) { return vandq_s32(vreinterpretq_s32_u32(mask), a); }
    static F negate_where(F a, I nonzero) {
        const uint32x4_t sign = vandq_u32(vtstq_s32(nonzero, nonzero), vdupq_n_u32(0x80000000u));
        return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(a), sign));
    }

    static I floor_int(F a) { return vcvtmq_s32_f32(a); }
    static I trunc_int(F a) { return vcvtq_s32_f32(a); }
    static I round_int(F a) { return vcvtnq_s32_f32(a); }
    static F to_float(I a) { return vcvtq_f32_s32(a); }

    static I addi(I a, I b) { return vaddq_s32(a, b); }
    static I andi(I a, I b) { return vandq_s32(a, b); }
    static I ori(I a, I b) { return vorrq_s32(a, b); }
    static I mini(I a, I b) { return vminq_s32(a, b); }
    static I maxi(I a, I b) { return vmaxq_s32(a, b); }
    static I shift_right(I a, Count n) { return vshlq_s32(a, vnegq_s32(n)); }
    static I shift_left(I a, Count n) { return vshlq_s32(a, n); }

    static int32_t largest(I a) { return vmaxvq_s32(a); }
    static float sum(F a) { return vaddvq_f32(a); }
    static int32_t sum(I a) { return vaddvq_s32(a); }

    static S narrow(I a, I b) { return vqmovn_high_s32(vqmovn_s32(a), b); }
    static S subs(S a, S b) { return vsubq_s16(a, b); }
    static S muls(S a, S b) { return vmulq_s16(a, b); }
    static S mins(S a, S b) { return vminq_s16(a, b); }
    static S maxs(S a, S b) { return vmaxq_s16(a, b); }
    static I add_squares(I sum, S a) { return vmlal_high_s16(vmlal_s16(sum, vget_low_s16(a), vget_low_s16(a)), a, a); }

    static void load_codes(const int16_t* code, Block<Neon>& block) {
        for (int v = 0; v < 8; ++v) block.part[v] = vmovl_s16(vld1_s16(code + 4 * v));
    }
    static void store_codes(int16_t* code, const Block<Neon>& block) {
        for (int v = 0; v < 8; ++v) vst1_s16(code + 4 * v, vmovn_s32(block.part[v]));
    }

    static void pack(const Block<Neon>& block, uint8_t* base, uint32_t* words) {
        uint8x16_t top[2], low[2];
        for (int h = 0; h < 2; ++h) {
            const int32x4_t* const part = block.part + 4 * h;
            const uint16x8_t a = vreinterpretq_u16_s16(vcombine_s16(vmovn_s32(part[0]), vmovn_s32(part[1])));
            const uint16x8_t b = vreinterpretq_u16_s16(vcombine_s16(vmovn_s32(part[2]), vmovn_s32(part[3])));
            top[h] = vcombine_u8(vshrn_n_u16(a, 5), vshrn_n_u16(b, 5));
            low[h] = vcombine_u8(vmovn_u16(a), vmovn_u16(b));
        }
        vst1q_u8(base, vorrq_u8(vuzp1q_u8(top[0], top[1]), vshlq_n_u8(vuzp2q_u8(top[0], top[1]), 4)));
        for (int p = 0; p < OTARO_BIT_PLANES; ++p) {
            const uint8x16_t bit = vdupq_n_u8(static_cast<uint8_t>(1 << (OTARO_BIT_PLANES - 1 - p)));
            uint32_t word = 0;
            for (int h = 0; h < 2; ++h) {
                const uint8x16_t places = vandq_u8(vtstq_u8(low[h], bit), bit_places());
                word |= static_cast<uint32_t>(vaddv_u8(vget_low_u8(places))) << (16 * h);
                word |= static_cast<uint32_t>(vaddv_u8(vget_high_u8(places))) << (16 * h + 8);
            }
            words[p] = word;
        }
    }

    template <int kPlanes>
    static void unpack(const uint8_t* base, uint8_t* const* planes, int64_t offset, Block<Neon>& block) {
        const uint8x16_t packed = vld1q_u8(base);
        const uint8x16_t even = vandq_u8(packed, vdupq_n_u8(15)), odd = vshrq_n_u8(packed, 4);
        const uint8x16_t top[2] = {vzip1q_u8(even, odd), vzip2q_u8(even, odd)};
        for (int h = 0; h < 2; ++h) {
            uint8x16_t low = vdupq_n_u8(0);
            for (int p = 0; p < kPlanes; ++p) {
                const uint8_t* const bytes = planes[p] + offset + 2 * h;
                const uint8x16_t copies = vcombine_u8(vdup_n_u8(bytes[0]), vdup_n_u8(bytes[1]));
                const uint8x16_t place = vdupq_n_u8(static_cast<uint8_t>(1 << (kPlanes - 1 - p)));
                low = vorrq_u8(low, vandq_u8(vtstq_u8(copies, bit_places()), place));
            }
            const uint16x8_t words[2] = {
                vorrq_u16(vshlq_n_u16(vmovl_u8(vget_low_u8(top[h])), kPlanes), vmovl_u8(vget_low_u8(low))),
                vorrq_u16(vshlq_n_u16(vmovl_u8(vget_high_u8(top[h])), kPlanes), vmovl_u8(vget_high_u8(low)))};
            for (int w = 0; w < 2; ++w) {
                block.part[4 * h + 2 * w] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words[w])));
                block.part[4 * h + 2 * w + 1] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(words[w])));
            }
        }
    }

  private:
    // 1, 2, 4 ... 128, twice: weight i's bit within its byte of a plane.
    static uint8x16_t bit_places() { return vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u)); }
};

} // namespace
} // namespace otaro
