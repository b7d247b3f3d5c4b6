// The engine's memory. All of it is zero at first and lies on a border of cache lines.
//
//     allocate   for what is used as a whole
//     reserve    for what fills up as a text grows: pages become real when they are written to, one by one
//     Arena      for planes that come and go together: one piece in large pages, and back to the system as one piece
//
// The C library would keep most of what is freed for later; what is mapped goes back at once.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

namespace otaro {

constexpr int64_t kAlignment = 64;

static inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
static inline int64_t aligned(int64_t bytes) { return round_up(bytes, kAlignment); }

struct Freed {
    int64_t mapped = 0;            // bytes, 0 for memory of the heap
    std::shared_ptr<void> arena{}; // that the memory is a part of
    void operator()(void* memory);
};
template <class T> using Memory = std::unique_ptr<T[], Freed>;
using Bytes = std::pair<void*, Freed>;

// These throw std::bad_alloc.
Bytes allocate_bytes(int64_t bytes);
Bytes reserve_bytes(int64_t bytes);

template <class T> Memory<T> owned(const Bytes& bytes) { return Memory<T>(static_cast<T*>(bytes.first), bytes.second); }
template <class T> Memory<T> allocate(int64_t count) {
    return owned<T>(allocate_bytes(count * static_cast<int64_t>(sizeof(T))));
}
template <class T> Memory<T> reserve(int64_t count) {
    return owned<T>(reserve_bytes(count * static_cast<int64_t>(sizeof(T))));
}

// Gives the pages that lie wholly within a part of reserved memory back; they are zero again.
void give_back(void* memory, int64_t bytes);
// What `bytes` of reserved memory take once they are written to.
int64_t whole_pages(int64_t bytes);

// Lives for as long as it, or memory from it, is held. Not for several threads at a time.
class Arena {
  public:
    explicit Arena(int64_t bytes);
    // From the arena while there is room, else as `allocate` gives it; also where there is no arena.
    static Bytes allocate(Arena* arena, int64_t bytes);

  private:
    std::shared_ptr<void> memory_;
    int64_t size_, used_ = 0;
};

} // namespace otaro
