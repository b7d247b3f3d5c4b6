// Picking the next token from logits, see `otaro_sampling`.
//
// Nothing is sorted. What cannot decide is left out first; weights are floats from 0 to 1, whose bits are ordered as they
// are, so among the rest the place where they are cut off, by their number or by their sum, is found digit by digit in three
// histograms. All sums are taken in an order of their own, whatever the instruction set, so a token depends on the logits,
// the settings and the seed alone.
#pragma once

#include <cstdint>

#include "engine_kernels.h"
#include "memory.h"
#include "otaro_engine.h"

namespace otaro {

// Rows of logits that tokens are picked from are padded to this many, and are overwritten.
constexpr int64_t kLogitsPadding = 16;
constexpr int64_t kMostTop = 1024;

static inline int64_t padded_vocabulary(int64_t vocabulary) {
    return (vocabulary + kLogitsPadding - 1) / kLogitsPadding * kLogitsPadding;
}

// A number from 0 to below 1 for each seed and position.
double random_number(uint64_t seed, uint64_t position);

// What is wanted besides a token: with `top` at least 0 the log-probability of the token, and those of the `top` likeliest
// behind it, and these tokens.
struct Odds {
    int64_t top;
    float* logprobs;
    int32_t* tokens;
};

// Room to pick tokens with, one at a time.
class Picker {
  public:
    Picker(int64_t vocabulary, const EngineKernels& kernels);
    static int64_t bytes(int64_t vocabulary);

    // From a row of logits with room for the padding, which is overwritten. OTARO_ERROR_NOT_FINITE where they are not.
    int pick(const otaro_sampling& sampling, float* logits, const int32_t* history, int64_t history_count,
             uint64_t position, int32_t* token, const Odds& odds);

  private:
    struct Bucket {
        int64_t count;
        double mass;
    };
    struct Bracket {
        float low, high;
        double above;
    };

    int32_t choose(const otaro_sampling& sampling, float* logits, int64_t best, uint64_t position);
    void penalize(float* logits, const int32_t* history, int64_t count, float penalty);
    Bracket surround(const float* weights, float floor, double mass);
    void list(const float* weights, float low, float high, int64_t most) {
        listed_ = kernels_->places(weights, vocabulary_, low, high, most, list_.get());
    }
    void cut(float* weights, int64_t most, double mass, double sum);
    float floor_of(const float* weights, int64_t most);
    int64_t find(const float* weights, const int32_t* places, int64_t left, int digit, int64_t most, double mass,
                 int64_t& number, double& sum);
    int32_t draw(const float* weights, float least, double number);
    int32_t draw_listed(const float* weights, float least, double number);
    void likeliest(const float* logits, const Odds& odds) const;

    int64_t vocabulary_, padded_;
    const EngineKernels* kernels_;
    Memory<uint8_t> seen_;
    Memory<Bucket> buckets_;
    Memory<int32_t> list_, rest_; // places of weights
    int64_t listed_ = 0;
    Memory<float> raw_, largest_, sums_;
};

} // namespace otaro
