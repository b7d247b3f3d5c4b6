// The codec with AVX2.

#include "kernels.h"

#if defined(__x86_64__)
#    include "codec_simd.h"
#    include "vectors_avx2.h"
const otaro::Kernels* const otaro::kernels_avx2 = &kKernels<Avx2>;
#else
const otaro::Kernels* const otaro::kernels_avx2 = nullptr;
#endif
