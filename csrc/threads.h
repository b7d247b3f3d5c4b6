// A small persistent thread pool.
#pragma once

#include <cstdint>

namespace otaro {

using RangeFunction = void (*)(void* context, int64_t first, int64_t last);

// Calls function(context, first, last) over [0, items) in ranges of `grain` items, on up to `threads` threads counting
// the caller's, and returns when all is done. Ranges are the same for every number of threads.
void run_ranges(int threads, int64_t items, int64_t grain, RangeFunction function, void* context);

template <class Body> void parallel(int threads, int64_t items, int64_t grain, Body& body) {
    run_ranges(
        threads, items, grain,
        [](void* context, int64_t first, int64_t last) { (*static_cast<Body*>(context))(first, last); }, &body);
}

} // namespace otaro
