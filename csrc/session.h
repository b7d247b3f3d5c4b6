// A text as a model keeps it: its tokens, and their keys and values at every layer. Running it is up to `work.h`.
#pragma once

#include <vector>

#include "engine_kernels.h"
#include "memory.h"
#include "model.h"

namespace otaro {

class Session {
  public:
    // `cache_mantissa` 0 keeps keys and values as float16. Throws std::bad_alloc, also for sizes beyond any machine.
    Session(const Model& model, int64_t context, int cache_mantissa);

    // Bytes of the keys and values of a whole context.
    static int64_t bytes(const Model& model, int64_t context, int cache_mantissa);

    const Model& model() const { return model_; }
    const Cache& cache() const { return cache_; }
    int64_t context() const { return context_; }
    int64_t capacity() const { return capacity_; } // positions, a multiple of kKeyBlock
    int64_t length() const { return length_; }     // positions filled
    const int32_t* tokens() const { return tokens_.data(); }

    uint8_t* keys(size_t layer) const { return memory_.get() + 2 * static_cast<int64_t>(layer) * layer_bytes_; }
    uint8_t* values(size_t layer) const { return keys(layer) + layer_bytes_; }

    // Forgets what lies at `position` and behind, and makes ready for tokens there, which `keep` then makes count.
    void begin(const int32_t* tokens, int64_t count, int64_t position);
    void keep(int64_t length) { length_ = length; }

    void release(int64_t length);                    // forgets positions from `length` on and gives their memory back
    void copy(const Session& other, int64_t length); // the first positions of another text of the same shape
    int64_t bytes() const { return bytes_; }
    int64_t in_use() const; // bytes that have been written to and not been given back

  private:
    const Model& model_;
    int64_t context_, capacity_;
    Cache cache_;
    int64_t layer_bytes_, bytes_;
    int64_t length_ = 0, written_ = 0; // positions filled; positions whose memory has been taken
    Memory<uint8_t> memory_;           // keys and values of each layer in turn
    std::vector<int32_t> tokens_;
};

} // namespace otaro
