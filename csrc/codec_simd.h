// All kernels of one instruction set, from its vector class (see simd.h).
#pragma once

#include "kernels.h"
#include "simd_decode.h"
#include "simd_encode.h"
#include "simd_linear.h"

namespace otaro {
namespace {

template <class V>
constexpr Kernels kKernels{scales<V>, encode<V>,   pack<V>,       quantize<V>,
                           decode<V>, truncate<V>, dequantize<V>, linear<V>};

} // namespace
} // namespace otaro
