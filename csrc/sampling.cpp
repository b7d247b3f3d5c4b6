#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace otaro {
namespace {

constexpr float kLeastTemperature = 1e-30f, kMostLogit = std::numeric_limits<float>::max();
constexpr int kDigits[] = {20, 9, 0}; // shifts: 12 bits, of which the sign is 0, then 11, then 9
constexpr uint32_t kDigitMask[] = {0x7ff, 0x7ff, 0x1ff};
constexpr int64_t kBuckets = 2048;

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

Picker::Picker(int64_t vocabulary, const EngineKernels& kernels)
    : vocabulary_(vocabulary), padded_(padded_vocabulary(vocabulary)), kernels_(&kernels),
      seen_(allocate<uint8_t>(vocabulary)), buckets_(allocate<Bucket>(2 * kBuckets)),
      rest_(allocate<int32_t>(vocabulary)), copy_(allocate<float>(padded_)),
      sums_(allocate<float>(sum_blocks(padded_))) {}

int64_t Picker::bytes(int64_t vocabulary) {
    const int64_t padded = padded_vocabulary(vocabulary), floats = padded + sum_blocks(padded);
    return 2 * kBuckets * static_cast<int64_t>(sizeof(Bucket)) +
           vocabulary * (1 + static_cast<int64_t>(sizeof(int32_t))) + floats * static_cast<int64_t>(sizeof(float));
}

int Picker::pick(const otaro_sampling& sampling, float* logits, const int32_t* history, int64_t history_count,
                 uint64_t position, int32_t* token, const Odds& odds) {
    int64_t best = 0;
    if (!kernels_->largest(logits, vocabulary_, &best)) return OTARO_ERROR_NOT_FINITE;
    double whole = 0; // the logarithm of the sum of exponentials
    if (odds.top >= 0) {
        std::fill(logits + vocabulary_, logits + padded_, -INFINITY);
        const float most = logits[best];
        whole = static_cast<double>(most) + std::log(kernels_->exponentials(logits, padded_, most, 1.0f, copy_.get()));
        likeliest(logits, odds);
        for (int64_t i = 0; i < odds.top; ++i) odds.logprobs[1 + i] = static_cast<float>(odds.logprobs[1 + i] - whole);
        std::copy_n(logits, vocabulary_, copy_.get());
    }
    if (sampling.repetition_penalty != 1 && history_count > 0) {
        penalize(logits, history, history_count, static_cast<float>(sampling.repetition_penalty));
        if (!kernels_->largest(logits, vocabulary_, &best)) return OTARO_ERROR_NOT_FINITE;
    }
    *token = choose(sampling, logits, best, position);
    if (odds.top >= 0) odds.logprobs[0] = static_cast<float>(static_cast<double>(copy_[*token]) - whole);
    return OTARO_OK;
}

// The likeliest is at place `best`.
int32_t Picker::choose(const otaro_sampling& sampling, float* logits, int64_t best, uint64_t position) {
    if (sampling.temperature == 0 || sampling.top_k == 1) return static_cast<int32_t>(best);
    std::fill(logits + vocabulary_, logits + padded_, -INFINITY);
    const float scale = 1.0f / std::max(static_cast<float>(sampling.temperature), kLeastTemperature);
    double total = kernels_->exponentials(logits, padded_, logits[best], scale, logits);
    const float* const weights = logits;
    Cut kept{0.0f, vocabulary_};
    if (sampling.top_k > 0 && sampling.top_k < vocabulary_) {
        kept = cut(weights, kept, 0.0f, sampling.top_k, INFINITY);
        total = 0;
        for (int64_t i = 0; i < vocabulary_; ++i) {
            if (weights[i] > kept.least || (weights[i] == kept.least && i <= kept.last)) total += weights[i];
        }
    }
    if (sampling.top_p < 1) {
        // What is less than this is not needed: all such weights together are less than what may be left out.
        const double spare = (1 - sampling.top_p) * total / static_cast<double>(vocabulary_);
        kept = cut(weights, kept, static_cast<float>(spare / 2), vocabulary_, sampling.top_p * total);
    }
    const float least = static_cast<float>(sampling.min_p); // the likeliest weighs 1
    if (least > kept.least) kept = {least, vocabulary_};
    return draw(logits, kept, random_number(sampling.seed, position));
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

// The weights in falling order, equal ones by their place, up to the `most`-th or to the one with which their sum reaches
// `mass`: where that ends. Those below `floor` or not `within` are not looked at.
Picker::Cut Picker::cut(const float* weights, Cut within, float floor, int64_t most, double mass) {
    // Two weights after another often fall into one bucket: with two sets of them neither waits for the other.
    Bucket* const all = buckets_.get();
    const auto find = [&](const auto& weight_of, int64_t count, int digit, int64_t& number, double& sum) {
        std::fill_n(all, 2 * kBuckets, Bucket{0, 0});
        for (int64_t i = 0; i < count; ++i) {
            const float weight = weight_of(i);
            if (weight < floor) continue;
            Bucket& bucket = all[digit_of(weight, digit) * 2 + (i & 1)];
            ++bucket.count;
            bucket.mass += static_cast<double>(weight);
        }
        int64_t last = -1; // the lowest that holds anything
        for (int64_t place = kBuckets - 1; place >= 0; --place) {
            const Bucket &first = all[2 * place], &second = all[2 * place + 1];
            const int64_t here = first.count + second.count;
            if (here == 0) continue;
            last = place;
            if (number + here >= most || sum + (first.mass + second.mass) >= mass) return last;
            number += here;
            sum += first.mass + second.mass;
        }
        if (last >= 0) { // all of them are kept
            number -= all[2 * last].count + all[2 * last + 1].count;
            sum -= all[2 * last].mass + all[2 * last + 1].mass;
        }
        return last;
    };
    int64_t number = 0; // of weights above
    double sum = 0;     // of these
    floor = std::max(floor, within.least);
    const auto inside = [&](int64_t i) { return weights[i] == within.least && i > within.last ? -1.0f : weights[i]; };
    int64_t place = find(inside, vocabulary_, 0, number, sum);
    if (place < 0) return within;
    int64_t left = 0;
    for (int64_t i = 0; i < vocabulary_; ++i) {
        rest_[left] = static_cast<int32_t>(i);
        left += digit_of(weights[i], 0) == place && !(inside(i) < floor);
    }
    const auto of_rest = [&](int64_t i) { return weights[rest_[i]]; };
    for (int digit = 1; digit < 3; ++digit) {
        place = find(of_rest, left, digit, number, sum);
        const auto elsewhere = [&](int32_t i) { return digit_of(weights[i], digit) != place; };
        left = std::remove_if(rest_.get(), rest_.get() + left, elsewhere) - rest_.get();
    }
    // What is left is one value, in the order of places.
    const float least = of_rest(0);
    int64_t equal = 0;
    do {
        ++number;
        sum += static_cast<double>(least);
    } while (++equal < left && number < most && sum < mass);
    if (equal < left) return {least, rest_[equal - 1]};
    return {least, least == within.least ? within.last : vocabulary_};
}

// The first token with which the sum of weights that are kept exceeds the share `number` of all of it.
int32_t Picker::draw(float* weights, const Cut& kept, double number) {
    for (int64_t i = kept.last + 1; i < vocabulary_; ++i) weights[i] = weights[i] == kept.least ? 0.0f : weights[i];
    const int64_t blocks = sum_blocks(padded_);
    kernels_->sums(weights, padded_, kept.least, sums_.get());
    double total = 0;
    for (int64_t i = 0; i < blocks; ++i) total += static_cast<double>(sums_[i]);
    double left = number * total;
    int64_t block = 0, found = 0, last = blocks - 1;
    while (last > 0 && sums_[last] == 0) --last; // beyond it only by rounding
    while (block < last && left >= static_cast<double>(sums_[block])) left -= static_cast<double>(sums_[block++]);
    const int64_t end = std::min((block + 1) * kSumBlock, vocabulary_);
    for (int64_t i = block * kSumBlock; i < end; ++i) {
        if (weights[i] == 0 || weights[i] < kept.least) continue;
        found = i;
        left -= static_cast<double>(weights[i]);
        if (left < 0) break;
    }
    return static_cast<int32_t>(found);
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
