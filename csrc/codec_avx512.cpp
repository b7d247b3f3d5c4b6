// The codec with AVX-512.

#include "kernels.h"

#if defined(__x86_64__)
#    include "codec_simd.h"
#    include "vectors_avx512.h"
const otaro::Kernels* const otaro::kernels_avx512 = &kKernels<Avx512>;
#else
const otaro::Kernels* const otaro::kernels_avx512 = nullptr;
#endif
