#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

namespace otaro {
namespace {

#if defined(OTARO_SANITIZE) // nothing mapped and not a byte too many: an access behind the end must be seen
constexpr bool kMapped = false;
#else
constexpr bool kMapped = true;
#endif
constexpr int64_t kMapFrom = int64_t{1} << 20, kReserveFrom = int64_t{1} << 14;
constexpr int64_t kLargePage = int64_t{1} << 21;

enum class Pages { kSmall, kLarge };

void* map(int64_t bytes, Pages pages) {
    void* const memory =
        mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
#if defined(__linux__)
    madvise(memory, static_cast<size_t>(bytes), pages == Pages::kLarge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
    (void)pages;
#endif
    return memory;
}

void unmap(void* memory, int64_t bytes) {
    if (bytes > 0) munmap(memory, static_cast<size_t>(bytes));
}

int64_t page_bytes() {
    static const int64_t bytes = sysconf(_SC_PAGESIZE);
    return bytes;
}

Bytes from_heap(int64_t bytes) {
    const int64_t size = kMapped ? aligned(std::max<int64_t>(bytes, 1)) : bytes;
    void* memory = nullptr;
    if (posix_memalign(&memory, kAlignment, static_cast<size_t>(size)) != 0) throw std::bad_alloc();
    memset(memory, 0, static_cast<size_t>(size));
    return {memory, Freed{}};
}

} // namespace

Bytes allocate_bytes(int64_t bytes) {
    if (!kMapped || bytes < kMapFrom) return from_heap(bytes);
    return {map(bytes, Pages::kLarge), Freed{bytes}};
}

Bytes reserve_bytes(int64_t bytes) {
    if (!kMapped || bytes < kReserveFrom) return from_heap(bytes);
    return {map(bytes, Pages::kSmall), Freed{bytes}};
}

void Freed::operator()(void* memory) {
    if (arena) {
        arena.reset();
    } else if (mapped > 0) {
        unmap(memory, mapped);
    } else {
        std::free(memory);
    }
}

void give_back(void* memory, int64_t bytes) {
#if defined(__linux__)
    const auto start = reinterpret_cast<uintptr_t>(memory), page = static_cast<uintptr_t>(page_bytes());
    const uintptr_t first = (start + page - 1) / page * page,
                    last = (start + static_cast<uintptr_t>(bytes)) / page * page;
    if (kMapped && first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#else
    (void)memory, (void)bytes;
#endif
}

int64_t whole_pages(int64_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

// A large page begins at a multiple of its size. What lies before the first one and behind the end is unmapped.
Arena::Arena(int64_t bytes) : size_(whole_pages(bytes)) {
    if (!kMapped || bytes == 0) {
        size_ = 0;
        return;
    }
    char* const memory = static_cast<char*>(map(size_ + kLargePage, Pages::kLarge));
    const int64_t before = -reinterpret_cast<intptr_t>(memory) & (kLargePage - 1);
    unmap(memory, before);
    unmap(memory + before + size_, kLargePage - before);
    memory_ = std::shared_ptr<void>(memory + before, [size = size_](void* start) { unmap(start, size); });
}

Bytes Arena::allocate(Arena* arena, int64_t bytes) {
    if (arena == nullptr || aligned(bytes) > arena->size_ - arena->used_) return allocate_bytes(bytes);
    char* const place = static_cast<char*>(arena->memory_.get()) + arena->used_;
    arena->used_ += aligned(bytes);
    return {place, Freed{0, arena->memory_}};
}

} // namespace otaro
