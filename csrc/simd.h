// The codec over a small vector abstraction; each instruction set's source file supplies the vectors and includes this.
//
// A vector class V has
//     F, I, S            vectors of float32, int32, int16; kLanes float32 lanes
//     load, store        lanes of float, Half or Brain to and from F, conversions rounding to nearest even
//     arithmetic         by the names that simd_encode.h, simd_decode.h and simd_linear.h use
//     narrow(a, b)       two of I as one of S, saturated, in any order that is always the same
//     add_squares(s, a)  s plus the squares of S, in any lanes
//     pack(c, base, w)   32 codes of 9 bits to 16 bytes of base and 5 words of bit planes
//     unpack<n>(...)     16 bytes of base and n words of bit planes to 32 codes
//     load_codes, store_codes    32 codes from and to int16
//
// The unit of work is a block of 32 codes in 32 / kLanes vectors of int32: it divides every group size, and it is 16 bytes
// of base and one 32-bit word of each bit plane. A group is read anew for its largest magnitude, for its scale and for its
// codes, but for the first time from L1. Codes go straight from registers to wherever they are wanted (a sink), be it
// planes, int16 or decoded values.
//
// The anonymous namespace keeps each instruction set's copy of these templates to itself.
#pragma once

#include "format.h"
#include "kernels.h"

namespace otaro {
namespace {

template <int N> struct Number {
    static constexpr int value = N;
};

template <class V> struct Block {
    static constexpr int kParts = kBlock / V::kLanes;
    typename V::I part[kParts];
};

// Calls body(Number<n>) with the number of bit planes that a width reads.
template <int N = 0, class Body> void with_planes(int planes, const Body& body) {
    if constexpr (N < OTARO_BIT_PLANES) {
        if (planes > N) return with_planes<N + 1>(planes, body);
    }
    body(Number<N>());
}

// The group itself, or where it is short a copy of it in `buffer` filled up with zeros.
template <class T> const T* padded(const T* data, int count, int size, T* buffer) {
    if (count == size) return data;
    memcpy(buffer, data, static_cast<size_t>(count) * sizeof(T));
    memset(static_cast<void*>(buffer + count), 0, static_cast<size_t>(size - count) * sizeof(T));
    return buffer;
}

} // namespace
} // namespace otaro
