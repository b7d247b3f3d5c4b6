// The engine's C ABI, texts and running them: checks every setting and the size of every buffer.

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "handles.h"
#include "work.h"

using namespace otaro;

struct otaro_work {
    Work work;
};

namespace {

constexpr int64_t kMostEntries = 1 << 16;

// A width for the embedding, for each layer and for the head.
int check_widths(const Model& model, const uint8_t* mantissa, int64_t bytes) {
    const int64_t widths = static_cast<int64_t>(model.layers.size()) + 2;
    if (bytes < widths) return OTARO_ERROR_BUFFER;
    for (int64_t i = 0; i < widths; ++i) {
        if (!valid_mantissa(mantissa[i])) return OTARO_ERROR_ARGUMENT;
    }
    return OTARO_OK;
}

bool valid_sampling(const otaro_sampling& sampling) {
    return std::isfinite(sampling.temperature) && sampling.temperature >= 0 && sampling.top_p > 0 &&
           sampling.top_p <= 1 && sampling.min_p >= 0 && sampling.min_p <= 1 && sampling.repetition_penalty >= 0.01 &&
           sampling.repetition_penalty <= 100 && sampling.top_k >= 0;
}

// Whether `rows` of `length` elements fit a buffer.
template <class T> bool fits(int64_t bytes, int64_t rows, int64_t length) {
    return length == 0 || bytes / static_cast<int64_t>(sizeof(T)) / length >= rows;
}

int check_top(int64_t vocabulary, int64_t rows, int64_t top, const float* logprobs, int64_t logprobs_bytes,
              const int32_t* tokens, int64_t tokens_bytes) {
    if (top < -1 || top > std::min(kMostTop, vocabulary)) return OTARO_ERROR_ARGUMENT;
    if ((top >= 0 && logprobs == nullptr) || (top > 0 && tokens == nullptr)) return OTARO_ERROR_ARGUMENT;
    if (!fits<float>(logprobs_bytes, rows, 1 + top)) return OTARO_ERROR_BUFFER;
    return top > 0 && !fits<int32_t>(tokens_bytes, rows, top) ? OTARO_ERROR_BUFFER : OTARO_OK;
}

// All of an entry that does not depend on what its session and the model hold.
int check_entry(const Model& model, const otaro_entry& entry) {
    if (entry.session == nullptr || entry.tokens == nullptr || entry.mantissa == nullptr) return OTARO_ERROR_ARGUMENT;
    if (&entry.session->session.model() != &model) return OTARO_ERROR_ARGUMENT;
    if (!within(entry.count, kMostRows) || entry.position < 0) return OTARO_ERROR_ARGUMENT;
    if (entry.rows < 0 || entry.rows > entry.count) return OTARO_ERROR_ARGUMENT;
    if (entry.rows > 0 && entry.logits == nullptr && entry.sampling == nullptr) return OTARO_ERROR_ARGUMENT;
    if (!fits<int32_t>(entry.tokens_bytes, entry.count, 1)) return OTARO_ERROR_BUFFER;
    if (entry.logits != nullptr && !fits<float>(entry.logits_bytes, entry.rows, model.vocabulary)) {
        return OTARO_ERROR_BUFFER;
    }
    if (entry.sampling != nullptr && entry.rows > 0) {
        if (!valid_sampling(*entry.sampling) || entry.picked == nullptr) return OTARO_ERROR_ARGUMENT;
        if (!fits<int32_t>(entry.picked_bytes, entry.rows, 1)) return OTARO_ERROR_BUFFER;
        const int error = check_top(model.vocabulary, entry.rows, entry.top, entry.logprobs, entry.logprobs_bytes,
                                    entry.top_tokens, entry.top_tokens_bytes);
        if (error != OTARO_OK) return error;
    }
    return check_widths(model, entry.mantissa, entry.mantissa_bytes);
}

} // namespace

// ---- sessions -------------------------------------------------------------------------------------------------------

int32_t otaro_cache_round(int32_t mantissa, const float* x, int64_t x_bytes, int64_t rows, int64_t dimension, float* y,
                          int64_t y_bytes, int32_t isa) {
    return guarded([&]() -> int {
        constexpr int64_t kSize = sizeof(float);
        if (!valid_mantissa(mantissa) || x == nullptr || y == nullptr) return OTARO_ERROR_ARGUMENT;
        if (rows < 0 || rows > kMostRows || !within(dimension, kMostHeadDimension)) return OTARO_ERROR_ARGUMENT;
        if (x_bytes < rows * dimension * kSize || y_bytes < rows * dimension * kSize) return OTARO_ERROR_BUFFER;
        const EngineKernels* const kernels = engine_kernels_for(isa);
        if (kernels == nullptr) return OTARO_ERROR_ISA;
        const Cache cache = cache_layout(mantissa, static_cast<int>(dimension));
        const Memory<uint8_t> coded = allocate<uint8_t>(cache.row_bytes);
        const Memory<float> values = allocate<float>(cache.padded_dimension);
        for (int64_t row = 0; row < rows; ++row) {
            kernels->encode_row(x + row * dimension, cache, coded.get());
            kernels->decode_row(coded.get(), cache, values.get());
            memcpy(y + row * dimension, values.get(), static_cast<size_t>(dimension * kSize));
        }
        return OTARO_OK;
    });
}

int32_t otaro_session_create(const otaro_model* model, int64_t context, int32_t cache_mantissa,
                             otaro_session** session) {
    return guarded([&]() -> int {
        if (model == nullptr || session == nullptr || !within(context, kMostRows)) return OTARO_ERROR_ARGUMENT;
        if (cache_mantissa != 0 && !valid_mantissa(cache_mantissa)) return OTARO_ERROR_ARGUMENT;
        *session = new otaro_session{Session(model->model, context, cache_mantissa)};
        return OTARO_OK;
    });
}

void otaro_session_destroy(otaro_session* session) { delete session; }

int32_t otaro_session_bytes(const otaro_session* session, int64_t* cache, int64_t* whole_cache) {
    if (session == nullptr || cache == nullptr || whole_cache == nullptr) return OTARO_ERROR_ARGUMENT;
    *cache = session->session.in_use();
    *whole_cache = session->session.bytes();
    return OTARO_OK;
}

int32_t otaro_session_release(otaro_session* session, int64_t length) {
    if (session == nullptr || length < 0) return OTARO_ERROR_ARGUMENT;
    session->session.release(length);
    return OTARO_OK;
}

int32_t otaro_session_copy(otaro_session* session, const otaro_session* other, int64_t length) {
    return guarded([&]() -> int {
        if (session == nullptr || other == nullptr || session == other || length < 0) return OTARO_ERROR_ARGUMENT;
        Session& to = session->session;
        const Session& from = other->session;
        if (&to.model() != &from.model() || to.cache().mantissa != from.cache().mantissa) return OTARO_ERROR_ARGUMENT;
        if (length > from.length() || length > to.context()) return OTARO_ERROR_INDEX;
        to.copy(from, length);
        return OTARO_OK;
    });
}

// ---- running --------------------------------------------------------------------------------------------------------

int32_t otaro_work_create(const otaro_model* model, int32_t isa, otaro_work** work) {
    return guarded([&]() -> int {
        if (model == nullptr || work == nullptr || !model->model.complete()) return OTARO_ERROR_ARGUMENT;
        const EngineKernels* const kernels = engine_kernels_for(isa);
        if (kernels == nullptr) return OTARO_ERROR_ISA;
        *work = new otaro_work{Work(model->model, *kernels)};
        return OTARO_OK;
    });
}

void otaro_work_destroy(otaro_work* work) { delete work; }

int32_t otaro_work_set_fine(otaro_work* work, int32_t fine) {
    if (work == nullptr) return OTARO_ERROR_ARGUMENT;
    work->work.set_fine(fine != 0);
    return OTARO_OK;
}

int32_t otaro_work_bytes(const otaro_work* work, int64_t* bytes) {
    if (work == nullptr || bytes == nullptr) return OTARO_ERROR_ARGUMENT;
    *bytes = work->work.bytes();
    return OTARO_OK;
}

int32_t otaro_size(const otaro_model* model, int32_t group_size, int64_t context, int32_t cache_mantissa,
                   int32_t threads, int64_t* cache, int64_t* work) {
    return guarded([&]() -> int {
        if (model == nullptr || cache == nullptr || work == nullptr) return OTARO_ERROR_ARGUMENT;
        const otaro_format format{OTARO_NESTED, group_size};
        if (check_format(&format) != OTARO_OK || !within(context, kMostRows)) return OTARO_ERROR_ARGUMENT;
        if (cache_mantissa != 0 && !valid_mantissa(cache_mantissa)) return OTARO_ERROR_ARGUMENT;
        if (!valid_threads(threads)) return OTARO_ERROR_ARGUMENT;
        *work = Work::bytes(model->model, group_size, context, cache_mantissa, threads);
        *cache = Session::bytes(model->model, context, cache_mantissa);
        return OTARO_OK;
    });
}

int32_t otaro_run(otaro_work* work, otaro_entry* entries, int64_t entries_bytes, int64_t count, int32_t threads) {
    return guarded([&]() -> int {
        if (work == nullptr || entries == nullptr || !within(count, kMostEntries)) return OTARO_ERROR_ARGUMENT;
        if (!valid_threads(threads)) return OTARO_ERROR_ARGUMENT;
        if (!fits<otaro_entry>(entries_bytes, count, 1)) return OTARO_ERROR_BUFFER;
        std::vector<const otaro_session*> sessions;
        for (int64_t i = 0; i < count; ++i) {
            const int error = check_entry(work->work.model(), entries[i]);
            if (error != OTARO_OK) return error;
            sessions.push_back(entries[i].session);
        }
        std::sort(sessions.begin(), sessions.end());
        if (std::adjacent_find(sessions.begin(), sessions.end()) != sessions.end()) return OTARO_ERROR_ARGUMENT;
        return work->work.run(entries, count, threads);
    });
}

int32_t otaro_draft(otaro_work* work, otaro_session* session, int32_t token, int64_t position, const uint8_t* mantissa,
                    int64_t mantissa_bytes, int64_t rows, float margin, int32_t* drafts, int64_t drafts_bytes,
                    int64_t* count, int32_t threads) {
    return guarded([&]() -> int {
        if (work == nullptr || session == nullptr || mantissa == nullptr || drafts == nullptr || count == nullptr) {
            return OTARO_ERROR_ARGUMENT;
        }
        const Model& model = work->work.model();
        if (&session->session.model() != &model) return OTARO_ERROR_ARGUMENT;
        if (position < 0 || !within(*count, kMostRows) || !within(rows, model.vocabulary)) return OTARO_ERROR_ARGUMENT;
        if (!valid_threads(threads)) return OTARO_ERROR_ARGUMENT;
        if (!fits<int32_t>(drafts_bytes, *count, 1)) return OTARO_ERROR_BUFFER;
        const int error = check_widths(model, mantissa, mantissa_bytes);
        if (error != OTARO_OK) return error;
        return work->work.draft(session->session, token, position, mantissa, rows, margin, drafts, count, threads);
    });
}

int32_t otaro_sample(const otaro_sampling* sampling, const float* logits, int64_t logits_bytes, int64_t vocabulary,
                     const int32_t* history, int64_t history_bytes, int64_t history_count, uint64_t position,
                     int32_t* token, int64_t top, float* logprobs, int64_t logprobs_bytes, int32_t* top_tokens,
                     int64_t top_tokens_bytes, int32_t isa) {
    return guarded([&]() -> int {
        if (sampling == nullptr || logits == nullptr || token == nullptr || !within(vocabulary, kMostRows - 1)) {
            return OTARO_ERROR_ARGUMENT;
        }
        if (history_count < 0 || (history_count > 0 && history == nullptr)) return OTARO_ERROR_ARGUMENT;
        if (!valid_sampling(*sampling)) return OTARO_ERROR_ARGUMENT;
        if (!fits<float>(logits_bytes, vocabulary, 1) || !fits<int32_t>(history_bytes, history_count, 1)) {
            return OTARO_ERROR_BUFFER;
        }
        const int error = check_top(vocabulary, 1, top, logprobs, logprobs_bytes, top_tokens, top_tokens_bytes);
        if (error != OTARO_OK) return error;
        for (int64_t i = 0; i < history_count; ++i) {
            if (history[i] < 0 || history[i] >= vocabulary) return OTARO_ERROR_INDEX;
        }
        const EngineKernels* const kernels = engine_kernels_for(isa);
        if (kernels == nullptr) return OTARO_ERROR_ISA;
        // Kept for the next call of this thread: taking the memory would cost more than picking.
        struct Room {
            int64_t vocabulary;
            const EngineKernels* kernels;
            Memory<float> row;
            Picker picker;
        };
        static thread_local std::unique_ptr<Room> room;
        if (room == nullptr || room->vocabulary != vocabulary || room->kernels != kernels) {
            room.reset(new Room{vocabulary, kernels, allocate<float>(padded_vocabulary(vocabulary)),
                                Picker(vocabulary, *kernels)});
        }
        std::copy_n(logits, vocabulary, room->row.get());
        const Team team(1); // for the mode of floats
        return room->picker.pick(*sampling, room->row.get(), history, history_count, position, token,
                                 {top, logprobs, top_tokens});
    });
}
