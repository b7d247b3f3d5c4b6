#include "matrix.h"

#include "threads.h"

namespace otaro {
namespace {

constexpr int64_t kTileGrain = 8;

// Every fourth bit of a word, from the lowest on, as one byte.
uint8_t every_fourth(uint32_t word) {
    word &= 0x11111111u;
    word = (word | word >> 3) & 0x03030303u;
    word = (word | word >> 6) & 0x000f000fu;
    return static_cast<uint8_t>(word | word >> 12);
}

} // namespace

Tiles tiles_of(int64_t rows, int64_t columns, int group_size) {
    Tiles tiles{};
    tiles.rows = rows;
    tiles.columns = columns;
    tiles.groups = (columns + group_size - 1) / group_size;
    tiles.group_blocks = group_size / kBlockColumns;
    tiles.blocks = tiles.groups * tiles.group_blocks;
    tiles.tiles = (rows + kTileRows - 1) / kTileRows;
    return tiles;
}

namespace {

int64_t base_bytes(const Tiles& tiles) { return tiles.tiles * tiles.blocks * kBaseBytes; }
int64_t scale_bytes(const Tiles& tiles) { return tiles.tiles * tiles.groups * kTileRows; }
int64_t plane_bytes(const Tiles& tiles) { return tiles.tiles * tiles.blocks * kPlaneBytes; }

Memory<uint8_t> plane_memory(Arena* arena, int64_t bytes) { return owned<uint8_t>(Arena::allocate(arena, bytes)); }

} // namespace

int64_t tiles_bytes(const Tiles& tiles, int mantissa) {
    return aligned(base_bytes(tiles)) + aligned(scale_bytes(tiles)) +
           (mantissa - kNarrowest) * aligned(plane_bytes(tiles));
}

Matrix::Matrix(int64_t rows, int64_t columns, int group_size)
    : tiles_(tiles_of(rows, columns, group_size)), group_size_(group_size) {}

void Matrix::set_base(const uint8_t* base, const uint8_t* scale, Arena* arena, int threads) {
    if (!base_) base_ = plane_memory(arena, base_bytes(tiles_));
    if (!scale_) scale_ = plane_memory(arena, scale_bytes(tiles_));
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
                scale_[(tile * tiles_.groups + group) * kTileRows + place] = scale[row * tiles_.groups + group];
            }
        }
    };
    parallel(threads, tiles_.tiles, kTileGrain, body);
    tiles_.base = base_.get();
    tiles_.scale = scale_.get();
}

void Matrix::set_bit(int plane, const uint8_t* bits, Arena* arena, int threads) {
    Memory<uint8_t> memory = plane_memory(arena, plane_bytes(tiles_));
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
    int64_t total = tiles_.base == nullptr ? 0 : tiles_bytes(tiles_, kNarrowest);
    for (const uint8_t* plane : tiles_.bits) {
        if (plane != nullptr) total += aligned(plane_bytes(tiles_));
    }
    return total;
}

void Matrix::row(int64_t index, int mantissa, float* values) const {
    const float bias = nested_bias(mantissa);
    for (int64_t start = 0; start < tiles_.columns; start += group_size_) {
        const float size = step(tile_scale(tiles_, index, start), mantissa);
        const int64_t end = tiles_.columns - start < group_size_ ? tiles_.columns : start + group_size_;
        for (int64_t k = start; k < end; ++k) {
            values[k] = (static_cast<float>(tile_code(tiles_, index, k, mantissa)) + bias) * size;
        }
    }
}

} // namespace otaro
