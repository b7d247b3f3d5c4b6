// The codec with Advanced SIMD.

#include "kernels.h"

#if defined(__aarch64__)

#    include "codec_simd.h"
#    include "vectors_neon.h"

namespace otaro {
const Kernels* const kernels_neon = &kKernels<Neon>;
}

#else

namespace otaro {
const Kernels* const kernels_neon = nullptr;
}

#endif
