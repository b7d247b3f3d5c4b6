// The objects behind the handles of the engine's C ABI, and bounds that its calls share.
#pragma once

#include "checks.h"
#include "session.h"

struct otaro_arena {
    otaro::Arena arena;
};

struct otaro_matrix {
    otaro_format format;
    otaro::Matrix matrix;
};

struct otaro_model {
    otaro::Model model;
};

struct otaro_session {
    otaro::Session session;
};

namespace otaro {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 31;

inline bool within(int64_t value, int64_t most) { return value > 0 && value <= most; }

inline bool valid_threads(int32_t threads) { return threads >= 1 && threads <= kMaxThreads; }

} // namespace
} // namespace otaro
