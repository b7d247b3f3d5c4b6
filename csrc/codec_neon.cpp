// The codec with Advanced SIMD.

#include "kernels.h"

#if defined(__aarch64__)
#    include "codec_simd.h"
#    include "vectors_neon.h"
const otaro::Kernels* const otaro::kernels_neon = &kKernels<Neon>;
#else
const otaro::Kernels* const otaro::kernels_neon = nullptr;
#endif
