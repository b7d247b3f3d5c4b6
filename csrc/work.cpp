#include "work.h"

#include <algorithm>
#include <cmath>
#include <new>

namespace otaro {
namespace {

constexpr int64_t kGuesses = 8; // rows of logits that are taken together: a token and guesses behind it
constexpr int64_t kMostScores = int64_t{1} << 44; // far beyond any machine, so that no product of sizes overflows

// Floats of scratch that attention over the whole context of a session takes.
int64_t score_floats(const Model& model, const Cache& cache, int64_t capacity) {
    const int64_t heads_per_key = model.heads / model.kv_heads;
    int64_t scores;
    if (__builtin_mul_overflow(heads_per_key * kQueryBlock, capacity, &scores) || scores > kMostScores)
        throw std::bad_alloc();
    return attention_scratch(cache, capacity, heads_per_key);
}

} // namespace

// ---- memory ---------------------------------------------------------------------------------------------------------

template <class T> Memory<T> Work::room(int64_t count, Bytes (*take)(int64_t bytes)) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    Memory<T> memory = counting_ ? Memory<T>() : owned<T>(take(bytes));
    bytes_ += bytes;
    return memory;
}

Work::Work(const Model& model, const EngineKernels& kernels)
    : Work(model, model.group_blocks * kBlockColumns, kernels, false) {}

Work::Work(const Model& model, int group_size, const EngineKernels& kernels, bool counting)
    : model_(model), kernels_(kernels), counting_(counting), stride_(padded_vocabulary(model.vocabulary)) {
    constexpr int64_t kRows = kMostRowsAtOnce;
    const int64_t query = model.heads * model.head_dimension, key = model.kv_heads * model.head_dimension;
    const int64_t half = model.head_dimension / 2;
    int64_t widest = 0;
    x_ = room<float>(kRows * model.hidden);
    normed_ = room<float>(kRows * model.hidden);
    query_ = room<float>(kRows * query);
    key_ = room<float>(kRows * key);
    value_ = room<float>(kRows * key);
    attended_ = room<float>(kRows * query);
    gate_ = room<float>(kRows * model.intermediate);
    up_ = room<float>(kRows * model.intermediate);
    cosine_ = room<float>(kRows * half);
    sine_ = room<float>(kRows * half);
    for (int role = OTARO_HEAD; role <= OTARO_DOWN; ++role) {
        const auto [rows, columns] = model.shape(role);
        const Tiles tiles = tiles_of(rows, columns, group_size);
        widest = std::max(widest, padded_columns(tiles));
        scratch_bytes_ = std::max(scratch_bytes_, product_scratch(tiles));
    }
    // Rows of each width begin at a multiple of kRowsTogether.
    constexpr int64_t kQuantized = kRows + (kWidest - kNarrowest + 1) * kRowsTogether;
    quantized_.coarse = room<int8_t>(kQuantized * widest);
    quantized_.fine = room<int8_t>(kQuantized * widest);
    quantized_.words = room<int16_t>(kQuantized * widest);
    quantized_.scale = room<float>(kQuantized * scale_stride(widest / kBlockColumns));
    quantized_.offset = room<float>(kQuantized * scale_stride(widest / kBlockColumns));
}

int64_t Work::bytes(const Model& model, int group_size, int64_t context, int cache_mantissa, int threads) {
    Work counted(model, group_size, *engine_kernels_ref, true);
    const Cache cache = cache_layout(cache_mantissa, static_cast<int>(model.head_dimension));
    counted.reserve(threads, score_floats(model, cache, round_up(context, kKeyBlock)), kGuesses);
    return counted.bytes();
}

// For threads, floats of scores each, and rows of logits that tokens are picked from.
void Work::reserve(int threads, int64_t scores, int64_t rows) {
    while (static_cast<int>(scratch_.size()) < threads) scratch_.push_back(room<uint8_t>(scratch_bytes_));
    if (scores > score_count_) {
        bytes_ -= score_count_ * static_cast<int64_t>(sizeof(float) * scores_.size());
        scores_.clear();
        score_count_ = scores;
    }
    while (static_cast<int>(scores_.size()) < threads) scores_.push_back(room<float>(score_count_, reserve_bytes));
    if (rows > 1) rows = round_up(rows, kGuesses);
    if (rows > logits_rows_) {
        bytes_ -= logits_rows_ * stride_ * static_cast<int64_t>(sizeof(float));
        logits_rows_ = 0;
        logits_ = room<float>(rows * stride_);
        logits_rows_ = rows;
    }
    while (rows > 0 && static_cast<int>(pickers_.size()) < threads) {
        pickers_.emplace_back(counting_ ? 0 : model_.vocabulary, kernels_);
        bytes_ += Picker::bytes(model_.vocabulary);
    }
}

// ---- what is run together -------------------------------------------------------------------------------------------

int Work::check(const Session& session, const int32_t* tokens, int64_t count, int64_t position,
                const uint8_t* mantissa) const {
    if (position > session.length() || count > session.context() - position) return OTARO_ERROR_INDEX;
    for (int64_t i = 0; i < count; ++i) {
        if (tokens[i] < 0 || tokens[i] >= model_.vocabulary) return OTARO_ERROR_INDEX;
    }
    return model_.holds(mantissa) ? OTARO_OK : OTARO_ERROR_PLANES;
}

int Work::run(otaro_entry* entries, int64_t count, int threads) {
    int64_t scores = 0, picked_rows = 0;
    for (int64_t i = 0; i < count; ++i) {
        const otaro_entry& entry = entries[i];
        const Session& session = entry.session->session;
        const int error = check(session, entry.tokens, entry.count, entry.position, entry.mantissa);
        if (error != OTARO_OK) return error;
        scores = std::max(scores, score_floats(model_, session.cache(), session.capacity()));
        if (entry.sampling != nullptr) picked_rows += std::min(entry.rows, kMostRowsAtOnce);
    }
    reserve(threads, scores, std::min(picked_rows, kMostRowsAtOnce));
    drafting_ = false;
    for (int64_t i = 0; i < count; ++i) {
        entries[i].picked_count = 0;
        entries[i].result = OTARO_OK;
    }
    Team team(threads);
    int64_t next = 0, done = 0; // entry, and tokens of it
    while (next < count) {
        parts_.clear();
        rows_ = 0;
        while (next < count && rows_ < kMostRowsAtOnce) {
            otaro_entry& entry = entries[next];
            const int64_t part = std::min(entry.count - done, kMostRowsAtOnce - rows_);
            const int64_t before = std::max(done - (entry.count - entry.rows), int64_t{0});
            const bool settled = entry.sampling != nullptr && entry.picked_count < before; // a guess did not hold
            if (entry.result == OTARO_OK && !settled) {
                Session& session = entry.session->session;
                const int64_t wanted = std::max(done + part - (entry.count - entry.rows), int64_t{0}) - before;
                parts_.push_back({&entry, &session, entry.tokens + done, entry.mantissa, part, entry.position + done,
                                  rows_, rows_, wanted, before, 0});
                session.begin(entry.tokens + done, part, entry.position + done);
                rows_ += part;
            }
            done += part;
            if (done == entry.count) {
                ++next;
                done = 0;
            }
        }
        run_parts(team);
        for (const Part& part : parts_) part.session->keep(part.position + part.count);
        answer(team);
    }
    return OTARO_OK;
}

// Likeliest tokens one after another, all with 8 bits of activations.
int Work::draft(Session& session, int32_t token, int64_t position, const uint8_t* mantissa, int64_t rows, float margin,
                int32_t* drafts, int64_t* count, int threads) {
    const int64_t most = *count;
    *count = 0;
    const int error = check(session, &token, 1, position, mantissa);
    if (error != OTARO_OK) return error;
    if (most > session.context() - position) return OTARO_ERROR_INDEX;
    reserve(threads, score_floats(model_, session.cache(), session.capacity()), 1);
    const float* const logits = logits_.get();
    Team team(threads);
    drafting_ = true;
    while (*count < most) {
        const int64_t place = position + *count;
        session.begin(&token, 1, place);
        parts_.assign(1, {nullptr, &session, &token, mantissa, 1, place, 0, 0, 0, 0, 0});
        rows_ = 1;
        run_parts(team);
        session.keep(place + 1);
        sources_.assign(1, 0);
        head(team, mantissa[model_.layers.size() + 1], rows, logits_.get(), stride_);
        float first = -INFINITY, second = -INFINITY;
        token = 0;
        for (int64_t i = 0; i < rows; ++i) {
            if (logits[i] > second) {
                if (logits[i] > first) {
                    second = first;
                    first = logits[i];
                    token = static_cast<int32_t>(i);
                } else {
                    second = logits[i];
                }
            }
        }
        drafts[(*count)++] = token;
        if (!(first - second >= margin)) break;
    }
    drafting_ = false;
    return OTARO_OK;
}

// Takes out the texts that are not wanted any more; their rows stay behind those of the others until these are arranged.
bool Work::drop_cancelled() {
    bool dropped = false;
    for (Part& part : parts_) {
        if (part.entry == nullptr || part.entry->cancel == nullptr) continue;
        if (__atomic_load_n(part.entry->cancel, __ATOMIC_RELAXED) == 0) continue;
        part.entry->result = OTARO_CANCELLED;
        part.entry->picked_count = 0;
        part.session->keep(part.entry->position);
        rows_ -= part.count;
        dropped = true;
    }
    if (dropped) {
        const auto gone = [](const Part& part) { return part.entry != nullptr && part.entry->result != OTARO_OK; };
        parts_.erase(std::remove_if(parts_.begin(), parts_.end(), gone), parts_.end());
    }
    return dropped;
}

// Rows in the order of their widths (number `width` of each text's), and which of them are neighbours of one width.
void Work::arrange(size_t width) {
    const auto narrower = [&](const Part& a, const Part& b) { return a.mantissa[width] < b.mantissa[width]; };
    if (!std::is_sorted(parts_.begin(), parts_.end(), narrower)) {
        std::stable_sort(parts_.begin(), parts_.end(), narrower);
    }
    int64_t row = 0;
    bool moved = false;
    groups_.clear();
    for (size_t i = 0; i < parts_.size(); ++i) {
        Part& part = parts_[i];
        if (groups_.empty() || groups_.back().mantissa != part.mantissa[width]) {
            groups_.push_back({part.mantissa[width], row, 0, {}});
        }
        groups_.back().count += part.count;
        moved = moved || part.first != row;
        // Into the memory of normed rows, which are not needed between two layers.
        std::copy_n(x_.get() + part.first * model_.hidden, moved ? part.count * model_.hidden : 0,
                    normed_.get() + row * model_.hidden);
        for (int64_t j = row; j < row + part.count; ++j) {
            part_of_[j] = static_cast<int16_t>(i);
            group_of_[j] = static_cast<int16_t>(groups_.size() - 1);
        }
        row += part.count;
    }
    if (!moved) return;
    row = 0;
    for (Part& part : parts_) {
        if (part.first != row) {
            std::copy_n(normed_.get() + row * model_.hidden, part.count * model_.hidden,
                        x_.get() + row * model_.hidden);
        }
        part.first = row;
        row += part.count;
    }
}

void Work::run_parts(Team& team) {
    drop_cancelled();
    if (parts_.empty()) return;
    arrange(1); // nothing to move yet
    embed(team);
    for (size_t i = 0; i < model_.layers.size(); ++i) {
        if (drop_cancelled() && parts_.empty()) return;
        arrange(i + 1);
        attention(team, model_.layers[i], i);
        feed_forward(team, model_.layers[i]);
    }
}

// ---- logits and tokens ----------------------------------------------------------------------------------------------

// Logits of the rows that they are wanted of, and tokens picked from them. Rows that a caller gets go straight to him; all
// others of one width share a reading of the head.
void Work::answer(Team& team) {
    const size_t width = model_.layers.size() + 1;
    const auto silent = [](const Part& part) { return part.wanted == 0; };
    parts_.erase(std::remove_if(parts_.begin(), parts_.end(), silent), parts_.end());
    const auto narrower = [&](const Part& a, const Part& b) { return a.mantissa[width] < b.mantissa[width]; };
    std::stable_sort(parts_.begin(), parts_.end(), narrower);
    const auto add_rows = [&](const Part& part) {
        for (int64_t i = part.count - part.wanted; i < part.count; ++i) sources_.push_back(part.first + i);
    };
    int64_t slots = 0; // rows of logits_ in use
    for (size_t begin = 0, end = 0; begin < parts_.size(); begin = end) {
        const int mantissa = parts_[begin].mantissa[width];
        const int64_t first = slots;
        sources_.clear();
        for (; end < parts_.size() && parts_[end].mantissa[width] == mantissa; ++end) {
            if (parts_[end].entry->logits != nullptr) continue;
            add_rows(parts_[end]);
            parts_[end].slot = slots;
            slots += parts_[end].wanted;
        }
        if (slots > first) head(team, mantissa, model_.vocabulary, logits_.get() + first * stride_, stride_);
        for (size_t i = begin; i < end; ++i) {
            Part& part = parts_[i];
            if (part.entry->logits == nullptr) continue;
            float* const rows = part.entry->logits + part.answered * model_.vocabulary;
            sources_.clear();
            add_rows(part);
            head(team, mantissa, model_.vocabulary, rows, model_.vocabulary);
            if (part.entry->sampling == nullptr) continue;
            part.slot = slots;
            for (int64_t row = 0; row < part.wanted; ++row, ++slots) {
                std::copy_n(rows + row * model_.vocabulary, model_.vocabulary, logits_.get() + slots * stride_);
            }
        }
    }
    team.run(static_cast<int64_t>(parts_.size()), 1, [&](int worker, int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const Part& part = parts_[static_cast<size_t>(i)];
            if (part.entry->sampling != nullptr) pick(part, pickers_[static_cast<size_t>(worker)]);
        }
    });
}

// A token from each row, up to the first that is not the one run after it.
void Work::pick(const Part& part, Picker& picker) {
    otaro_entry& entry = *part.entry;
    for (int64_t row = 0; row < part.wanted; ++row) {
        float* const logits = logits_.get() + (part.slot + row) * stride_;
        const int64_t number = entry.picked_count, run = entry.count - entry.rows + number + 1; // tokens up to this row
        const int64_t position = entry.position + run;
        int32_t& token = entry.picked[number];
        const Odds odds{entry.top, entry.top < 0 ? nullptr : entry.logprobs + number * (1 + entry.top),
                        entry.top < 1 ? nullptr : entry.top_tokens + number * entry.top};
        const int error = picker.pick(*entry.sampling, logits, part.session->tokens(), position,
                                      static_cast<uint64_t>(position), &token, odds);
        if (error != OTARO_OK) {
            entry.result = error;
            entry.picked_count = 0;
            part.session->keep(entry.position);
            return;
        }
        ++entry.picked_count;
        if (run < entry.count && token != entry.tokens[run]) {
            part.session->keep(position); // behind lie guesses that did not hold
            return;
        }
    }
}

} // namespace otaro
