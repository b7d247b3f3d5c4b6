// A small persistent thread pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

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

// Threads that stay together over many short phases of work, one after another, such as the layers of a model: between
// phases they wait in a loop, because waking a thread takes longer than a phase. The caller works too and never waits for
// a helper that has not come, so a busy machine costs speed, not progress.
class Team {
  public:
    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int threads() const { return threads_; }

    // Calls body(worker, first, last) over [0, items) in ranges, worker below the number of threads, and returns when all is
    // done. Which worker gets a range is left to chance. Ranges have `grain` items; tapered ones begin with half of a
    // thread's share and halve from there down to `grain`: memory is read faster in long stretches, and short ones at the
    // end let all threads end together.
    template <class Body> void run(int64_t items, int64_t grain, const Body& body, bool tapered = false) {
        if (items <= 0) return;
        start(
            {items, grain, tapered ? items / threads_ / 2 / grain * grain : 0},
            [](void* context, int worker, int64_t first, int64_t last) {
                (*static_cast<const Body*>(context))(worker, first, last);
            },
            const_cast<Body*>(&body));
    }

  private:
    using TaskFunction = void (*)(void* context, int worker, int64_t first, int64_t last);
    struct Ranges {
        int64_t items, grain;
        int64_t longest; // of tapered ranges, a multiple of the grain; 0: all have `grain` items
    };
    struct Phase {
        TaskFunction function;
        void* context;
        Ranges ranges;
    };
    struct Members;

    // A ticket: the phase in the upper bits, then the number of ranges, then the next range.
    static constexpr int kRangesShift = 20, kPhaseShift = 40;
    static constexpr int64_t kMostRanges = (int64_t{1} << kRangesShift) - 1;
    static constexpr int64_t kMostThreads = 1 << 16;

    void start(const Ranges& ranges, TaskFunction function, void* context);
    int64_t count(Ranges ranges) const;
    std::pair<int64_t, int64_t> range(Ranges ranges, int64_t number) const; // its first item and the one behind it
    bool take(int worker);
    void help(int worker);

    std::unique_ptr<Members> members_;
    int threads_;
    bool alone_;
    uint64_t phase_ = 0;
    Phase phases_[2] = {};
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<bool> over_{false};
};

} // namespace otaro
