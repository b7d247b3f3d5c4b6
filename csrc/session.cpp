#include "session.h"

#include <algorithm>
#include <new>

namespace otaro {
namespace {

// Bytes of the keys of a layer, and of all layers, far beyond any machine, so that no product of sizes overflows.
constexpr int64_t kMostCached = int64_t{1} << 44;

int64_t all_bytes(const Model& model, const Cache& cache, int64_t capacity) {
    const int64_t layers = static_cast<int64_t>(model.layers.size());
    int64_t layer, all;
    if (__builtin_mul_overflow(model.kv_heads * cache.row_bytes, capacity, &layer) || layer > kMostCached ||
        __builtin_mul_overflow(layer, 2 * layers, &all) || all > kMostCached)
        throw std::bad_alloc();
    return all;
}

} // namespace

Session::Session(const Model& model, int64_t context, int cache_mantissa)
    : model_(model), context_(context), capacity_(round_up(context, kKeyBlock)),
      cache_(cache_layout(cache_mantissa, static_cast<int>(model.head_dimension))), layer_bytes_(0),
      bytes_(all_bytes(model, cache_, capacity_)), memory_(reserve<uint8_t>(bytes_)) {
    layer_bytes_ = bytes_ / 2 / static_cast<int64_t>(model.layers.size());
}

int64_t Session::bytes(const Model& model, int64_t context, int cache_mantissa) {
    const Cache cache = cache_layout(cache_mantissa, static_cast<int>(model.head_dimension));
    return all_bytes(model, cache, round_up(context, kKeyBlock));
}

void Session::begin(const int32_t* tokens, int64_t count, int64_t position) {
    if (static_cast<int64_t>(tokens_.size()) < position + count) tokens_.resize(static_cast<size_t>(position + count));
    length_ = position;
    written_ = std::max(written_, position + count);
    std::copy(tokens, tokens + count, tokens_.begin() + position);
}

int64_t Session::in_use() const {
    const int64_t head = whole_pages(round_up(written_, kKeyBlock) * cache_.row_bytes);
    return std::min(bytes_, 2 * static_cast<int64_t>(model_.layers.size()) * model_.kv_heads * head);
}

void Session::release(int64_t length) {
    length_ = std::min(length_, length);
    if (length >= written_) return;
    const int64_t from = round_up(length, kKeyBlock) * cache_.row_bytes, head = capacity_ * cache_.row_bytes;
    for (int64_t start = 0; start < bytes_; start += head) give_back(memory_.get() + start + from, head - from);
    written_ = length;
}

void Session::copy(const Session& other, int64_t length) {
    // Keys lie in blocks: the last of them comes as a whole, what is too much in it is not looked at.
    const int64_t part = round_up(length, kKeyBlock) * cache_.row_bytes;
    const int64_t head = capacity_ * cache_.row_bytes, other_head = other.capacity_ * cache_.row_bytes;
    begin(other.tokens(), length, 0);
    for (int64_t i = 0; i < bytes_ / head; ++i) {
        std::copy_n(other.memory_.get() + i * other_head, part, memory_.get() + i * head);
    }
    length_ = length;
}

} // namespace otaro
