// A small persistent thread pool.
//
// A call publishes a job with places for some helpers, works on it itself, and waits for the helpers that took a place.
// Idle workers take any job that has a place left, so calls from several threads share the same workers. Ranges are
// handed out by one atomic counter.
//
// Workers are detached and the pool is never destroyed, so nothing is torn down under a running thread at exit. A forked
// child has none of its parent's threads and perhaps a locked mutex, so it forgets the pool and makes its own.

#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <pthread.h>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#    include <immintrin.h>
#endif

namespace otaro {
namespace {

// Rounds to nearest and keeps subnormals for as long as it lives, whatever the calling program has set.
class DefaultFloatMode {
  public:
#if defined(__x86_64__)
    DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~DefaultFloatMode() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#elif defined(__aarch64__)
    DefaultFloatMode() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
    }
    ~DefaultFloatMode() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

  private:
    uint64_t saved_;
#else
    DefaultFloatMode() {}
#endif
};

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Layers follow each other within microseconds while a token is computed; waking a sleeping thread takes longer than
// that. So a thread looks around this many times (a few tens of microseconds) before it sleeps.
constexpr int kSpins = 600;

struct Job {
    RangeFunction function;
    void* context;
    int64_t items, grain;
    std::atomic<int64_t> next{0};
    int places;                  // helpers that may still join; under the pool's mutex
    std::atomic<int> working{0}; // helpers that joined and have not left

    void work() {
        const DefaultFloatMode mode;
        for (;;) {
            const int64_t first = next.fetch_add(grain, std::memory_order_relaxed);
            if (first >= items) return;
            function(context, first, items - first < grain ? items : first + grain);
        }
    }
};

class Pool {
  public:
    void run(Job& job) {
        publish(job);
        job.work();
        withdraw(job);
    }

    void publish(Job& job) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            grow(job.places);
            jobs_.push_back(&job);
            published_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
    }

    // No helper joins any more; returns when those that did have left.
    void withdraw(Job& job) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (size_t i = 0; i < jobs_.size(); ++i) {
                if (jobs_[i] == &job) {
                    jobs_.erase(jobs_.begin() + static_cast<std::ptrdiff_t>(i));
                    break;
                }
            }
        }
        for (int spin = 0; spin < kSpins && job.working.load(std::memory_order_acquire) != 0; ++spin) relax();
        if (job.working.load(std::memory_order_acquire) != 0) {
            std::unique_lock<std::mutex> lock(mutex_);
            done_.wait(lock, [&] { return job.working.load(std::memory_order_acquire) == 0; });
        }
    }

  private:
    // More workers if there are too few. Without them a call is slower, not wrong.
    void grow(int workers) {
        try {
            while (workers_ < workers) {
                std::thread(&Pool::serve, this).detach();
                ++workers_;
            }
        } catch (const std::system_error&) {
        }
    }

    void serve() {
        uint64_t seen = 0;
        for (;;) {
            for (int spin = 0; spin < kSpins && published_.load(std::memory_order_acquire) == seen; ++spin) relax();
            Job* job = nullptr;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return (job = take()) != nullptr; });
                seen = published_.load(std::memory_order_relaxed);
            }
            job->work();
            // The job lies on its caller's stack: after the last helper has left it must not be touched.
            const std::lock_guard<std::mutex> lock(mutex_);
            job->working.fetch_sub(1, std::memory_order_release);
            done_.notify_all();
        }
    }

    Job* take() {
        for (Job* job : jobs_) {
            if (job->places > 0 && job->next.load(std::memory_order_relaxed) < job->items) {
                --job->places;
                job->working.fetch_add(1, std::memory_order_relaxed);
                return job;
            }
        }
        return nullptr;
    }

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::vector<Job*> jobs_;
    std::atomic<uint64_t> published_{0};
    int workers_ = 0;
};

std::atomic<Pool*> pool{nullptr};

void forget_pool() { pool.store(nullptr); }

Pool& the_pool() {
    Pool* current = pool.load(std::memory_order_acquire);
    if (current != nullptr) return *current;
    static std::atomic<bool> registered{false};
    if (!registered.exchange(true)) pthread_atfork(nullptr, nullptr, forget_pool);
    Pool* const fresh = new Pool;
    if (pool.compare_exchange_strong(current, fresh)) return *fresh;
    delete fresh;
    return *current;
}

} // namespace

void run_ranges(int threads, int64_t items, int64_t grain, RangeFunction function, void* context) {
    if (items <= 0) return;
    const int64_t ranges = (items - 1) / grain + 1;
    Job job;
    job.function = function;
    job.context = context;
    job.items = items;
    job.grain = grain;
    job.places = static_cast<int>(ranges < threads ? ranges : threads) - 1;
    if (job.places < 1) {
        job.work();
    } else {
        the_pool().run(job);
    }
}

// ---- teams ----------------------------------------------------------------------------------------------------------

struct Team::Members {
    DefaultFloatMode mode; // the caller's; helpers have their own
    Job job;
};

Team::Team(int threads) : members_(new Members), threads_(threads), alone_(threads < 2) {
    if (alone_) return;
    Job& job = members_->job;
    job.function = [](void* context, int64_t first, int64_t) {
        static_cast<Team*>(context)->help(static_cast<int>(first) + 1);
    };
    job.context = this;
    job.items = job.places = threads - 1;
    job.grain = 1;
    the_pool().publish(job);
}

Team::~Team() {
    over_.store(true, std::memory_order_release);
    if (!alone_) the_pool().withdraw(members_->job);
}

int64_t Team::count(Ranges ranges) const {
    int64_t count = 0;
    for (; ranges.longest > ranges.grain; ranges.longest = ranges.longest / 2 / ranges.grain * ranges.grain) {
        count += threads_;
        ranges.items -= threads_ * ranges.longest;
    }
    return count + (ranges.items + ranges.grain - 1) / ranges.grain;
}

std::pair<int64_t, int64_t> Team::range(Ranges ranges, int64_t number) const {
    int64_t first = 0;
    while (ranges.longest > ranges.grain && number >= threads_) {
        number -= threads_;
        first += threads_ * ranges.longest;
        ranges.longest = ranges.longest / 2 / ranges.grain * ranges.grain;
    }
    const int64_t size = ranges.longest > ranges.grain ? ranges.longest : ranges.grain;
    first += number * size;
    return {first, ranges.items - first < size ? ranges.items : first + size};
}

void Team::start(const Ranges& all, TaskFunction function, void* context) {
    const int64_t ranges = count(all);
    // Every thread may ask once too often: the count must not run over into the field beside it.
    if (alone_ || ranges < 2 || ranges > kMostRanges - kMostThreads) {
        function(context, 0, 0, all.items);
        return;
    }
    const uint64_t phase = ++phase_;
    Phase& current = phases_[phase % 2];
    current = {function, context, all};
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(phase << kPhaseShift | static_cast<uint64_t>(ranges) << kRangesShift, std::memory_order_release);
    while (take(0)) {
    }
    int64_t spins = 0;
    while (done_.load(std::memory_order_acquire) != ranges) {
        relax();
        // A helper that holds a range may have lost its processor to somebody else, or to us.
        if (++spins % kSpins == 0) std::this_thread::yield();
    }
}

// Takes a range if one is left and works on it. The ticket says all that decides: which phase, how many ranges, which is
// next. So a helper that comes late, after the phase it saw has ended, either takes a range of the next one or none.
bool Team::take(int worker) {
    const uint64_t seen = ticket_.load(std::memory_order_relaxed);
    const auto ranges = [](uint64_t ticket) { return ticket >> kRangesShift & kMostRanges; };
    const auto next = [](uint64_t ticket) { return ticket & kMostRanges; };
    if (next(seen) >= ranges(seen)) return false;
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (next(ticket) >= ranges(ticket)) return false;
    const Phase& phase = phases_[(ticket >> kPhaseShift) % 2];
    const auto [first, last] = range(phase.ranges, static_cast<int64_t>(next(ticket)));
    phase.function(phase.context, worker, first, last);
    done_.fetch_add(1, std::memory_order_release);
    return true;
}

void Team::help(int worker) {
    int64_t spins = 0;
    while (!over_.load(std::memory_order_acquire)) {
        if (take(worker)) {
            spins = 0;
            continue;
        }
        relax();
        if (++spins % kSpins == 0) std::this_thread::yield();
    }
}

} // namespace otaro
