// Look-up tables against dot products, for a matrix-vector product straight from the planes at E5M3 ... E5M8.
//
// The look-up way: for every 4 activations the 16 sums of their subsets are tabulated once; a plane's bits of 4 neighbouring
// columns are then an index into that table, and one byte shuffle looks up 64 rows. Cost is proportional to the planes: the
// base counts as four. Sums of bytes overflow, so looked-up bytes are added in 16 bits, even and odd bytes apart.
//
// Instructions for 64 rows x 4 columns, loads left out (AVX-512):
//     look-up        a plane: and or shift+and (1.5), shuffle (1), two 16-bit sums (5)           7.5
//     dot products   4 steps of 16 x 4: base 2 each, a plane 2 each, dot 1 each                  12 + 8 a plane
//     so E5M3: 30 against 12, E5M4: 37.5 against 20, E5M7: 60 against 44
// Measured, they draw level from E5M6 on, where the planes no longer come from the base. But the tables hold 8 bits of a sum
// of four activations, two bits less of each than the dot products use, and must be made anew for every activation, while
// the same unpacked step serves several activations at a time. So the engine uses dot products at every width.
//
//     g++ -O3 -march=native -std=c++17 bench/lookup.cpp -o lookup && ./lookup

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <immintrin.h>
#include <random>
#include <vector>

namespace {

constexpr int kRows = 1536, kColumns = 576, kTile = 64;

// Planes as nibbles: [tile][column / 8][64 rows], the low half of a byte columns 0-3, the high half columns 4-7.
void lookup(const std::vector<std::vector<uint8_t>>& planes, const int8_t* tables, int16_t* even_odd) {
    for (int tile = 0; tile < kRows / kTile; ++tile) {
        __m512i total_even = _mm512_setzero_si512(), total_odd = _mm512_setzero_si512();
        for (const std::vector<uint8_t>& plane : planes) {
            __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();
            const uint8_t* next = plane.data() + static_cast<size_t>(tile) * kColumns / 8 * kTile;
            const __m512i low = _mm512_set1_epi8(15);
            for (int c = 0; c < kColumns / 8; ++c, next += kTile) {
                const __m512i indices = _mm512_loadu_si512(next);
                for (int half = 0; half < 2; ++half) {
                    const __m512i index = _mm512_and_si512(half ? _mm512_srli_epi16(indices, 4) : indices, low);
                    const __m128i entries =
                        _mm_loadu_si128(reinterpret_cast<const __m128i*>(tables + (2 * c + half) * 16));
                    const __m512i found = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), index);
                    even = _mm512_add_epi16(even, _mm512_srai_epi16(_mm512_slli_epi16(found, 8), 8));
                    odd = _mm512_add_epi16(odd, _mm512_srai_epi16(found, 8));
                }
            }
            total_even = _mm512_add_epi16(_mm512_slli_epi16(total_even, 1), even);
            total_odd = _mm512_add_epi16(_mm512_slli_epi16(total_odd, 1), odd);
        }
        _mm512_storeu_si512(even_odd + tile * kTile, total_even);
        _mm512_storeu_si512(even_odd + tile * kTile + kTile / 2, total_odd);
    }
}

// The engine's way, without scales: [tile of 16][column / 4] vectors; base two steps a vector, planes eight steps.
template <int kPlanes> void dots(const uint8_t* base, const uint8_t* const* bits, const int8_t* x, int32_t* y) {
    const __m512i low = _mm512_set1_epi8(static_cast<char>(15 << kPlanes));
    for (int tile = 0; tile < kRows / 16; ++tile) {
        __m512i sums[4] = {}; // apart, so that one dot product need not wait for the other
        for (int block = 0; block < kColumns / 32; ++block) {
            const size_t place = static_cast<size_t>(tile * (kColumns / 32) + block);
            __m512i plane[kPlanes + 1];
            for (int p = 0; p < kPlanes; ++p) plane[p] = _mm512_loadu_si512(bits[p] + place * 64);
#pragma GCC unroll 8
            for (int step = 0; step < 8; ++step) {
                const __m512i pair = _mm512_loadu_si512(base + place * 256 + step % 4 * 64);
                const __m512i moved =
                    step < 4 ? _mm512_slli_epi16(pair, kPlanes) : _mm512_srli_epi16(pair, 4 - kPlanes);
                __m512i code = _mm512_and_si512(moved, low);
#pragma GCC unroll 4
                for (int p = 0; p < kPlanes; ++p) {
                    const int to = kPlanes - 1 - p;
                    const __m512i there =
                        step >= to ? _mm512_srli_epi16(plane[p], step - to) : _mm512_slli_epi16(plane[p], to - step);
                    code = _mm512_ternarylogic_epi32(code, there, _mm512_set1_epi8(static_cast<char>(1 << to)), 0xf8);
                }
                int32_t four;
                __builtin_memcpy(&four, x + block * 32 + step * 4, 4);
                sums[step % 4] = _mm512_dpbusd_epi32(sums[step % 4], code, _mm512_set1_epi32(four));
            }
        }
        const __m512i left = _mm512_add_epi32(sums[0], sums[1]), right = _mm512_add_epi32(sums[2], sums[3]);
        _mm512_storeu_si512(y + tile * 16, _mm512_add_epi32(left, right));
    }
}

template <class Body> double best(const Body& body) {
    double least = 1e9;
    for (int i = 0; i < 300; ++i) {
        const auto start = std::chrono::steady_clock::now();
        body();
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        if (taken.count() < least) least = taken.count();
    }
    return least;
}

} // namespace

int main() {
    std::mt19937 random(1);
    const auto bytes = [&](size_t count) {
        std::vector<uint8_t> data(count);
        for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
        return data;
    };
    const std::vector<uint8_t> tables = bytes(kColumns / 4 * 16), x = bytes(kColumns),
                               base = bytes(kRows * kColumns / 2);
    std::vector<std::vector<uint8_t>> planes;
    for (int p = 0; p < 9; ++p) planes.push_back(bytes(kRows * kColumns / 8));
    std::vector<int16_t> short_sums(kRows);
    std::vector<int32_t> sums(kRows);
    const uint8_t* bits[4];
    for (int p = 0; p < 4; ++p) bits[p] = planes[static_cast<size_t>(p)].data();
    const auto report = [](const char* name, double seconds) {
        std::printf("%-28s %6.1f us, %5.1f weights/ns\n", name, seconds * 1e6, kRows * kColumns / seconds / 1e9);
    };
    for (const int count : {4, 5, 7, 8, 9}) {
        const std::vector<std::vector<uint8_t>> used(planes.begin(), planes.begin() + count);
        char name[32];
        std::snprintf(name, sizeof name, "look-up, E5M%d", count - 1);
        report(name, best([&] { lookup(used, reinterpret_cast<const int8_t*>(tables.data()), short_sums.data()); }));
    }
    const int8_t* const activations = reinterpret_cast<const int8_t*>(x.data());
    report("dot products, E5M3", best([&] { dots<0>(base.data(), bits, activations, sums.data()); }));
    report("dot products, E5M4", best([&] { dots<1>(base.data(), bits, activations, sums.data()); }));
    report("dot products, E5M6", best([&] { dots<3>(base.data(), bits, activations, sums.data()); }));
    report("dot products, E5M7", best([&] { dots<4>(base.data(), bits, activations, sums.data()); }));
    return short_sums[0] + sums[0] == 12345;
}
