#include "matrix.h"

#include <cstdlib>
#include <new>
#include <sys/mman.h>

#include "threads.h"

namespace otaro {
namespace {

constexpr int64_t kAlignment = 64;
#if defined(OTARO_SANITIZE) // nothing mapped and not a byte too many: an access behind the end must be seen
constexpr int64_t kMapFrom = INT64_MAX;
constexpr bool kExact = true;
#else
constexpr int64_t kMapFrom = int64_t{1} << 20;
constexpr bool kExact = false;
#endif
constexpr int64_t kTileGrain = 8;

// Every fourth bit of a word, from the lowest on, as one byte.
uint8_t every_fourth(uint32_t word) {
    word &= 0x11111111u;
    word = (word | word >> 3) & 0x03030303u;
    word = (word | word >> 6) & 0x000f000fu;
    return static_cast<uint8_t>(word | word >> 12);
}

} // namespace

std::pair<void*, Freed> allocate_bytes(int64_t bytes) {
    const int64_t size = kExact ? bytes : (bytes + kAlignment) / kAlignment * kAlignment;
    if (size >= kMapFrom) {
        void* const memory =
            mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
#if defined(__linux__)
        // Fewer and larger pages: weights are read from end to end for every token.
        madvise(memory, static_cast<size_t>(size), MADV_HUGEPAGE);
#endif
        return {memory, Freed{size}};
    }
    void* memory = nullptr;
    if (posix_memalign(&memory, kAlignment, static_cast<size_t>(size)) != 0) throw std::bad_alloc();
    memset(memory, 0, static_cast<size_t>(size));
    return {memory, Freed{}};
}

void Freed::operator()(void* memory) const {
    if (mapped > 0) {
        munmap(memory, static_cast<size_t>(mapped));
    } else {
        std::free(memory);
    }
}

Matrix::Matrix(int64_t rows, int64_t columns, int group_size) : group_size_(group_size) {
    tiles_.rows = rows;
    tiles_.columns = columns;
    tiles_.groups = (columns + group_size - 1) / group_size;
    tiles_.group_blocks = group_size / kBlockColumns;
    tiles_.blocks = tiles_.groups * tiles_.group_blocks;
    tiles_.tiles = (rows + kTileRows - 1) / kTileRows;
}

void Matrix::set_base(const uint8_t* base, const uint8_t* exponent, const uint8_t* polarity, int threads) {
    if (!base_) base_ = allocate<uint8_t>(tiles_.tiles * tiles_.blocks * kBaseBytes);
    if (!scale_) scale_ = allocate<uint8_t>(tiles_.tiles * tiles_.groups * kTileRows);
    auto body = [&](int64_t first, int64_t last) {
        for (int64_t row = first * kTileRows; row < last * kTileRows && row < tiles_.rows; ++row) {
            const int64_t tile = row / kTileRows, place = row % kTileRows;
            for (int64_t block = 0; block < tiles_.blocks; ++block) {
                uint64_t first_half, second_half; // 16 codes of 4 bits each
                const uint8_t* const from = base + (row * tiles_.blocks + block) * (kBlockColumns / 2);
                memcpy(&first_half, from, sizeof first_half);
                memcpy(&second_half, from + sizeof first_half, sizeof second_half);
                uint8_t* const to = base_.get() + (tile * tiles_.blocks + block) * kBaseBytes + place * kStepColumns;
                for (int v = 0; v < 4; ++v) {
                    for (int c = 0; c < kStepColumns; ++c) {
                        const int shift = 4 * (4 * v + c);
                        to[v * kStepBytes + c] =
                            static_cast<uint8_t>((first_half >> shift & 15) | (second_half >> shift & 15) << 4);
                    }
                }
            }
            for (int64_t group = 0; group < tiles_.groups; ++group) {
                const int64_t entry = row * tiles_.groups + group;
                const bool negated = polarity != nullptr && stream_bit(polarity, entry);
                scale_[(tile * tiles_.groups + group) * kTileRows + place] =
                    static_cast<uint8_t>(stream_exponent(exponent, entry) | (negated ? kNegated : 0));
            }
        }
    };
    parallel(threads, tiles_.tiles, kTileGrain, body);
    tiles_.base = base_.get();
    tiles_.scale = scale_.get();
}

void Matrix::set_bit(int plane, const uint8_t* bits, int threads) {
    Memory<uint8_t> memory = allocate<uint8_t>(plane_bytes());
    auto body = [&](int64_t first, int64_t last) {
        for (int64_t row = first * kTileRows; row < last * kTileRows && row < tiles_.rows; ++row) {
            for (int64_t block = 0; block < tiles_.blocks; ++block) {
                uint32_t word;
                memcpy(&word, bits + (row * tiles_.blocks + block) * sizeof word, sizeof word);
                uint8_t* const to = memory.get() + (row / kTileRows * tiles_.blocks + block) * kPlaneBytes +
                                    row % kTileRows * kStepColumns;
                for (int c = 0; c < kStepColumns; ++c) to[c] = every_fourth(word >> c);
            }
        }
    };
    parallel(threads, tiles_.tiles, kTileGrain, body);
    bits_[plane] = std::move(memory);
    tiles_.bits[plane] = bits_[plane].get();
}

void Matrix::drop_bit(int plane) {
    tiles_.bits[plane] = nullptr;
    bits_[plane].reset();
}

bool Matrix::holds(int mantissa) const {
    if (tiles_.base == nullptr) return false;
    for (int p = 0; p < mantissa - kNarrowest; ++p) {
        if (tiles_.bits[p] == nullptr) return false;
    }
    return true;
}

int64_t Matrix::bytes() const {
    int64_t total = 0;
    if (tiles_.base != nullptr) {
        total += tiles_.tiles * (tiles_.blocks * kBaseBytes + tiles_.groups * kTileRows);
    }
    for (const uint8_t* plane : tiles_.bits) {
        if (plane != nullptr) total += plane_bytes();
    }
    return total;
}

void Matrix::row(int64_t index, int mantissa, float* values) const {
    const float bias = nested_bias(mantissa);
    for (int64_t start = 0; start < tiles_.columns; start += group_size_) {
        const float size = tile_step(tiles_, index, start, mantissa);
        const int64_t end = tiles_.columns - start < group_size_ ? tiles_.columns : start + group_size_;
        for (int64_t k = start; k < end; ++k) {
            values[k] = (static_cast<float>(tile_code(tiles_, index, k, mantissa)) + bias) * size;
        }
    }
}

} // namespace otaro
