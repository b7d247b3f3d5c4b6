#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace otaro {
namespace {

constexpr double kLeastTemperature = 1e-30, kMostTemperature = 1e30; // their inverses are numbers, and not 0
constexpr float kMostLogit = std::numeric_limits<float>::max();
constexpr int kDigits[] = {20, 9, 0}; // shifts: 12 bits, of which the sign is 0, then 11, then 9
constexpr uint32_t kDigitMask[] = {0x7ff, 0x7ff, 0x1ff};
constexpr int64_t kBuckets = 2048;
constexpr int64_t kFew = 8;       // a part of all weights that is listed as it is
constexpr int kPasses = 6;        // through all weights, to find a part that is
constexpr int64_t kPieceRows = 4; // of padding, in a piece of weights whose largest is looked for

int64_t sum_blocks(int64_t length) { return (length + kSumBlock - 1) / kSumBlock; }

int64_t digit_of(float weight, int digit) { return float_bits(weight) >> kDigits[digit] & kDigitMask[digit]; }

uint64_t mixed(uint64_t value) { // the output function of splitmix64
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}

} // namespace

double random_number(uint64_t seed, uint64_t position) {
    // The seed is mixed first: neighbouring seeds would otherwise give the same numbers a few positions apart.
    const uint64_t start = mixed(seed + 0x9e3779b97f4a7c15u);
    const uint64_t bits = mixed(start + (position + 1) * 0x9e3779b97f4a7c15u);
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

// Pages become real when they are used: greedy tokens use none of it.
Picker::Picker(int64_t vocabulary, const EngineKernels& kernels)
    : vocabulary_(vocabulary), padded_(padded_vocabulary(vocabulary)), kernels_(&kernels),
      seen_(reserve<uint8_t>(vocabulary)), buckets_(reserve<Bucket>(2 * kBuckets)), list_(reserve<int32_t>(vocabulary)),
      rest_(reserve<int32_t>(vocabulary)), raw_(reserve<float>(padded_)),
      largest_(reserve<float>(padded_ / kLogitsPadding)), sums_(reserve<float>(sum_blocks(padded_))) {}

int64_t Picker::bytes(int64_t vocabulary) {
    const int64_t padded = padded_vocabulary(vocabulary),
                  floats = padded + padded / kLogitsPadding + sum_blocks(padded);
    return 2 * kBuckets * static_cast<int64_t>(sizeof(Bucket)) +
           vocabulary * (1 + 2 * static_cast<int64_t>(sizeof(int32_t))) + floats * static_cast<int64_t>(sizeof(float));
}

int Picker::pick(const otaro_sampling& sampling, float* logits, const int32_t* history, int64_t history_count,
                 uint64_t position, int32_t* token, const Odds& odds) {
    int64_t best = 0;
    if (!kernels_->largest(logits, vocabulary_, &best)) return OTARO_ERROR_NOT_FINITE;
    double whole = 0; // the logarithm of the sum of exponentials
    if (odds.top >= 0) {
        std::fill(logits + vocabulary_, logits + padded_, -INFINITY);
        const float most = logits[best];
        whole = static_cast<double>(most) + std::log(kernels_->exponentials(logits, padded_, most, 1.0f, raw_.get()));
        likeliest(logits, odds);
        for (int64_t i = 0; i < odds.top; ++i) odds.logprobs[1 + i] = static_cast<float>(odds.logprobs[1 + i] - whole);
        std::copy_n(logits, vocabulary_, raw_.get());
    }
    if (sampling.repetition_penalty != 1 && history_count > 0) {
        penalize(logits, history, history_count, static_cast<float>(sampling.repetition_penalty));
        if (!kernels_->largest(logits, vocabulary_, &best)) return OTARO_ERROR_NOT_FINITE;
    }
    *token = choose(sampling, logits, best, position);
    if (odds.top >= 0) odds.logprobs[0] = static_cast<float>(static_cast<double>(raw_[*token]) - whole);
    return OTARO_OK;
}

// The likeliest is at place `best`.
int32_t Picker::choose(const otaro_sampling& sampling, float* logits, int64_t best, uint64_t position) {
    if (sampling.temperature == 0 || sampling.top_k == 1) return static_cast<int32_t>(best);
    std::fill(logits + vocabulary_, logits + padded_, -INFINITY);
    const float scale = static_cast<float>(1 / std::clamp(sampling.temperature, kLeastTemperature, kMostTemperature));
    double total = kernels_->exponentials(logits, padded_, logits[best], scale, logits);
    float* const weights = logits;
    const float least = static_cast<float>(sampling.min_p); // the likeliest weighs 1
    const double number = random_number(sampling.seed, position);
    if (sampling.top_k > 0 && sampling.top_k < vocabulary_) {
        list(weights, floor_of(weights, sampling.top_k), INFINITY, vocabulary_);
        cut(weights, sampling.top_k, INFINITY, 0);
        total = 0;
        for (int64_t i = 0; i < listed_; ++i) total += static_cast<double>(weights[list_[i]]);
        if (sampling.top_p < 1) cut(weights, vocabulary_, sampling.top_p * total, 0);
        return draw_listed(weights, least, number);
    }
    if (sampling.top_p == 1) return draw(weights, least, number);
    const double mass = sampling.top_p * total;
    // What is less than this is not needed: all such weights together are less than what may be left out.
    const float floor = static_cast<float>((total - mass) / static_cast<double>(2 * vocabulary_));
    list(weights, floor, INFINITY, vocabulary_ / kFew);
    if (listed_ <= vocabulary_ / kFew) {
        cut(weights, vocabulary_, mass, 0);
        return draw_listed(weights, least, number);
    }
    const Bracket bracket = surround(weights, floor, mass);
    list(weights, bracket.low, bracket.high, vocabulary_);
    // Sums are rounded, and next to 1 even that of all weights may fall short: then all are kept.
    if (listed_ == 0) return draw(weights, std::max(floor, least), number);
    cut(weights, vocabulary_, mass, bracket.above);
    return draw(weights, std::max(bracket.low, least), number);
}

void Picker::penalize(float* logits, const int32_t* history, int64_t count, float penalty) {
    for (int64_t i = 0; i < count; ++i) {
        const int32_t token = history[i];
        if (seen_[token]) continue;
        seen_[token] = 1;
        const float value = logits[token] > 0 ? logits[token] / penalty : logits[token] * penalty;
        logits[token] = std::max(std::min(value, kMostLogit), -kMostLogit);
    }
    for (int64_t i = 0; i < count; ++i) seen_[history[i]] = 0;
}

// No more than the `most`-th largest weight: the largest weights of pieces are that many weights too.
float Picker::floor_of(const float* weights, int64_t most) {
    const int64_t pieces = padded_ / kLogitsPadding / kPieceRows;
    if (most > pieces) return 0;
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const float* const row = weights + piece * kPieceRows * kLogitsPadding;
        float largest[kLogitsPadding] = {};
        for (int64_t i = 0; i < kPieceRows; ++i) {
            for (int64_t lane = 0; lane < kLogitsPadding; ++lane) {
                const float weight = row[i * kLogitsPadding + lane];
                largest[lane] = weight > largest[lane] ? weight : largest[lane];
            }
        }
        largest_[piece] = *std::max_element(largest, largest + kLogitsPadding);
    }
    float* const place = largest_.get() + most - 1;
    std::nth_element(largest_.get(), place, largest_.get() + pieces, std::greater<float>());
    return *place;
}

// Two weights, near each other, between which the sum of all weights from there on falls below `mass`; and the sum of those
// above both.
Picker::Bracket Picker::surround(const float* weights, float floor, double mass) {
    uint32_t low = float_bits(floor), high = float_bits(1.0f) + 1;
    double above = 0;
    for (int pass = 0; pass < kPasses && high - low > 1; ++pass) {
        const uint32_t middle = low + (high - low) / 2;
        kernels_->sums(weights, padded_, bits_float(middle), sums_.get());
        double sum = 0;
        for (int64_t i = 0; i < sum_blocks(padded_); ++i) sum += static_cast<double>(sums_[i]);
        if (sum >= mass) {
            low = middle;
        } else {
            high = middle;
            above = sum;
        }
    }
    return {bits_float(low), bits_float(high), above};
}

// Leaves of the list, in falling order of weights and equal ones by their place, those up to the `most`-th or to the one
// with which their sum, and what lies above, reaches `mass`. The others weigh nothing from then on. The list itself stays in
// the order of places.
void Picker::cut(float* weights, int64_t most, double mass, double sum) {
    int64_t number = 0, left = listed_; // weights above; weights that are still to be told apart
    const int32_t* from = list_.get();
    for (int digit = 0; digit < 3; ++digit) {
        const int64_t place = find(weights, from, left, digit, most, mass, number, sum);
        int64_t there = 0;
        for (int64_t i = 0; i < left; ++i) {
            const int32_t token = from[i];
            rest_[there] = token;
            there += digit_of(weights[token], digit) == place;
        }
        from = rest_.get();
        left = there;
    }
    // What is left is one value.
    const float least = weights[rest_[0]];
    int64_t equal = 0;
    do {
        ++number;
        sum += static_cast<double>(least);
    } while (++equal < left && number < most && sum < mass);
    const int32_t last = rest_[equal - 1];
    int64_t kept = 0;
    for (int64_t i = 0; i < listed_; ++i) {
        const float weight = weights[list_[i]];
        const bool keep = weight > least || (weight == least && list_[i] <= last);
        weights[list_[i]] = keep ? weight : 0.0f;
        list_[kept] = list_[i];
        kept += keep;
    }
    listed_ = kept;
}

// The digit of the weight where `most` or `mass` is reached, among those at `places`; the number and the sum of those with
// a higher digit are added.
int64_t Picker::find(const float* weights, const int32_t* places, int64_t left, int digit, int64_t most, double mass,
                     int64_t& number, double& sum) {
    Bucket* const buckets = buckets_.get();
    std::fill_n(buckets, 2 * kBuckets, Bucket{0, 0});
    for (int64_t i = 0; i < left; ++i) {
        // Two weights after another often fall into one bucket: with two sets of them neither waits for the other.
        const float weight = weights[places[i]];
        Bucket& bucket = buckets[2 * digit_of(weight, digit) + (i & 1)];
        ++bucket.count;
        bucket.mass += static_cast<double>(weight);
    }
    int64_t lowest = kBuckets; // that holds anything
    for (int64_t place = kBuckets - 1; place >= 0; --place) {
        const Bucket &first = buckets[2 * place], &second = buckets[2 * place + 1];
        const int64_t count = first.count + second.count;
        if (count == 0) continue;
        lowest = place;
        if (number + count >= most || sum + (first.mass + second.mass) >= mass) return place;
        number += count;
        sum += first.mass + second.mass;
    }
    // By rounding it was not reached: all are kept but, for now, the lowest.
    const Bucket &first = buckets[2 * lowest], &second = buckets[2 * lowest + 1];
    number -= first.count + second.count;
    sum -= first.mass + second.mass;
    return lowest;
}

// The first token with which the sum of weights that are not below `least` exceeds the share `number` of all of it.
int32_t Picker::draw(const float* weights, float least, double number) {
    const int64_t blocks = sum_blocks(padded_);
    kernels_->sums(weights, padded_, least, sums_.get());
    double left = 0;
    for (int64_t i = 0; i < blocks; ++i) left += static_cast<double>(sums_[i]);
    left *= number;
    int64_t block = 0, found = 0, last = blocks - 1;
    while (last > 0 && sums_[last] == 0) --last; // beyond it only by rounding
    while (block < last && left >= static_cast<double>(sums_[block])) left -= static_cast<double>(sums_[block++]);
    const int64_t end = std::min((block + 1) * kSumBlock, vocabulary_);
    for (int64_t i = block * kSumBlock; i < end; ++i) {
        if (weights[i] == 0 || weights[i] < least) continue;
        found = i;
        left -= static_cast<double>(weights[i]);
        if (left < 0) break;
    }
    return static_cast<int32_t>(found);
}

// The same of the list.
int32_t Picker::draw_listed(const float* weights, float least, double number) {
    double sums[4] = {}; // so that an addition does not wait for the one before
    int64_t kept = 0;
    for (int64_t i = 0; i < listed_; ++i) {
        list_[kept] = list_[i];
        const float weight = weights[list_[i]];
        if (weight < least) continue;
        sums[kept++ % 4] += static_cast<double>(weight);
    }
    double left = number * ((sums[0] + sums[1]) + (sums[2] + sums[3]));
    int64_t i = 0;
    while (i < kept - 1 && left >= static_cast<double>(weights[list_[i]]))
        left -= static_cast<double>(weights[list_[i++]]);
    return list_[i];
}

// The likeliest tokens and their logits.
void Picker::likeliest(const float* logits, const Odds& odds) const {
    if (odds.top == 0) return;
    // A heap of the likeliest so far, the least of them first; of equal ones the later is less.
    const auto before = [&](int32_t a, int32_t b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    };
    int32_t* const end = odds.tokens + odds.top;
    for (int64_t i = 0; i < odds.top; ++i) odds.tokens[i] = static_cast<int32_t>(i);
    std::make_heap(odds.tokens, end, before);
    for (int64_t i = odds.top; i < vocabulary_; ++i) {
        if (!(logits[i] > logits[odds.tokens[0]])) continue;
        std::pop_heap(odds.tokens, end, before);
        end[-1] = static_cast<int32_t>(i);
        std::push_heap(odds.tokens, end, before);
    }
    std::sort_heap(odds.tokens, end, before);
    for (int64_t i = 0; i < odds.top; ++i) odds.logprobs[1 + i] = logits[odds.tokens[i]];
}

} // namespace otaro
