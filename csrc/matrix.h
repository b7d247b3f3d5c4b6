// A packed matrix as the engine keeps it (see tiles.h): planes come and go, the base stays.
#pragma once

#include "memory.h"
#include "tiles.h"

namespace otaro {

// The sizes of a matrix in tiles; it holds nothing yet.
Tiles tiles_of(int64_t rows, int64_t columns, int group_size);
// Bytes of memory of all planes that a width reads.
int64_t tiles_bytes(const Tiles& tiles, int mantissa);

class Matrix {
  public:
    Matrix(int64_t rows, int64_t columns, int group_size);

    // From the planes of a file; sizes have been checked. Without an arena, or room in it, planes have memory of their own.
    void set_base(const uint8_t* base, const uint8_t* scale, Arena* arena, int threads);
    void set_bit(int plane, const uint8_t* bits, Arena* arena, int threads);
    void drop_bit(int plane);

    bool holds(int mantissa) const;
    int64_t bytes() const;
    const Tiles& tiles() const { return tiles_; }

    // One row as floats at a width.
    void row(int64_t index, int mantissa, float* values) const;

  private:
    Tiles tiles_{};
    int group_size_;
    Memory<uint8_t> base_, scale_, bits_[OTARO_BIT_PLANES];
};

} // namespace otaro
