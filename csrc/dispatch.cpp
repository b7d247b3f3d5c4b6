// Run-time choice of instruction set. An extension counts only if the operating system saves its registers, which
// XGETBV tells; CPUID alone does not.

#include "dispatch.h"
#include "engine_kernels.h"

#if defined(__x86_64__)
#    include <cpuid.h>
#endif

namespace otaro {
namespace {

struct Machine {
    bool avx2 = false, avx512 = false, vnni = false, neon = false;

    Machine() {
#if defined(__x86_64__)
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        constexpr unsigned kFma = 1u << 12, kOsXsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
        constexpr unsigned kNeeded = kFma | kOsXsave | kAvx | kF16c;
        if ((c & kNeeded) != kNeeded) return;
        unsigned low, high;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        constexpr unsigned kYmm = 0x06, kZmm = 0xe6;
        if ((low & kYmm) != kYmm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        constexpr unsigned kAvx2 = 1u << 5, kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; // F, DQ, BW, VL
        avx2 = (b & kAvx2) != 0;
        avx512 = avx2 && (low & kZmm) == kZmm && (b & kAvx512) == kAvx512;
        constexpr unsigned kVnni = 1u << 11;
        vnni = avx512 && (c & kVnni) != 0;
#elif defined(__aarch64__)
        neon = true;
#endif
    }
};

const Machine& machine() {
    static const Machine found;
    return found;
}

// The table of an instruction set, null where this machine does not run it.
template <class Table>
const Table* chosen(int32_t isa, const Table* reference, const Table* avx2, const Table* avx512, const Table* neon) {
    switch (isa == OTARO_AUTO ? best_isa() : isa) {
    case OTARO_REFERENCE: return reference;
    case OTARO_AVX2: return machine().avx2 ? avx2 : nullptr;
    case OTARO_AVX512: return machine().avx512 ? avx512 : nullptr;
    case OTARO_NEON: return machine().neon ? neon : nullptr;
    default: return nullptr;
    }
}

} // namespace

int32_t best_isa() {
    constexpr int32_t kBestFirst[] = {OTARO_AVX512, OTARO_AVX2, OTARO_NEON};
    for (const int32_t isa : kBestFirst) {
        if (kernels_for(isa) != nullptr) return isa;
    }
    return OTARO_REFERENCE;
}

const Kernels* kernels_for(int32_t isa) { return chosen(isa, kernels_ref, kernels_avx2, kernels_avx512, kernels_neon); }

const EngineKernels* engine_kernels_for(int32_t isa) {
    const EngineKernels* const avx512 = machine().vnni ? engine_kernels_avx512 : engine_kernels_avx2;
    return chosen(isa, engine_kernels_ref, engine_kernels_avx2, avx512, engine_kernels_neon);
}

} // namespace otaro
