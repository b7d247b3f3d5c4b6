// A packed matrix as the engine keeps it (see tiles.h): planes come and go, the base stays.
#pragma once

#include <memory>
#include <utility>

#include "tiles.h"

namespace otaro {

// Memory that is zero at first and lies on a border of cache lines. Large pieces are mapped: they take no real memory
// until they are written to, so a long context costs nothing before it is used.
struct Freed {
    int64_t mapped = 0; // bytes, 0 for memory of the heap
    void operator()(void* memory) const;
};
template <class T> using Memory = std::unique_ptr<T[], Freed>;

std::pair<void*, Freed> allocate_bytes(int64_t bytes); // throws std::bad_alloc
template <class T> Memory<T> allocate(int64_t count) {
    const auto [memory, freed] = allocate_bytes(count * static_cast<int64_t>(sizeof(T)));
    return Memory<T>(static_cast<T*>(memory), freed);
}

class Matrix {
  public:
    Matrix(int64_t rows, int64_t columns, int group_size);

    // From the planes of a file; sizes have been checked.
    void set_base(const uint8_t* base, const uint8_t* exponent, const uint8_t* polarity, int threads);
    void set_bit(int plane, const uint8_t* bits, int threads);
    void drop_bit(int plane);

    bool holds(int mantissa) const;
    int64_t bytes() const;
    const Tiles& tiles() const { return tiles_; }

    // One row as floats at a width.
    void row(int64_t index, int mantissa, float* values) const;

  private:
    int64_t plane_bytes() const { return tiles_.tiles * tiles_.blocks * kPlaneBytes; }

    Tiles tiles_{};
    int group_size_;
    Memory<uint8_t> base_, scale_, bits_[OTARO_BIT_PLANES];
};

} // namespace otaro
