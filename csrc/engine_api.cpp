// The engine's C ABI: checks every setting and the size of every buffer.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "checks.h"
#include "work.h"

using namespace otaro;

struct otaro_arena {
    Arena arena;
};

struct otaro_matrix {
    otaro_format format;
    Matrix matrix;
};

struct otaro_model {
    Model model;
};

struct otaro_work {
    Work work;
};

namespace {

constexpr int64_t kMostRows = int64_t{1} << 31;
constexpr int64_t kMostBytes = int64_t{1} << 46; // of planes, far beyond any machine
constexpr int64_t kMostEntries = 1 << 16;

bool within(int64_t value, int64_t most) { return value > 0 && value <= most; }

bool of_whole_matrix(int32_t role) { return role == OTARO_EMBEDDING || role == OTARO_HEAD; }

// A width for the embedding, for each layer and for the head.
int check_widths(const Model& model, const uint8_t* mantissa, int64_t bytes) {
    const int64_t widths = static_cast<int64_t>(model.layers.size()) + 2;
    if (bytes < widths) return OTARO_ERROR_BUFFER;
    for (int64_t i = 0; i < widths; ++i) {
        if (!valid_mantissa(mantissa[i])) return OTARO_ERROR_ARGUMENT;
    }
    return OTARO_OK;
}

bool valid_threads(int32_t threads) { return threads >= 1 && threads <= kMaxThreads; }

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

// Room for a product outside a session.
class Workspace {
  public:
    Workspace(const Tiles& tiles, int64_t batch, bool fine, int threads)
        : coarse_(allocate<int8_t>(batch * padded_columns(tiles))),
          fine_(allocate<int8_t>(fine ? batch * padded_columns(tiles) : 0)),
          words_(allocate<int16_t>(fine ? batch * padded_columns(tiles) : 0)),
          scale_(allocate<float>(batch * tiles.blocks)), offset_(allocate<float>(batch * tiles.blocks)) {
        for (int i = 0; i < threads; ++i) scratch_.push_back(allocate<uint8_t>(product_scratch(tiles)));
        x_ = {coarse_.get(), fine ? fine_.get() : nullptr, words_.get(), scale_.get(),
              offset_.get(), padded_columns(tiles),        tiles.blocks};
    }
    const Activations& x() const { return x_; }
    uint8_t* scratch(int worker) const { return scratch_[static_cast<size_t>(worker)].get(); }

  private:
    Memory<int8_t> coarse_, fine_;
    Memory<int16_t> words_;
    Memory<float> scale_, offset_;
    std::vector<Memory<uint8_t>> scratch_;
    Activations x_;
};

} // namespace

// ---- matrices -------------------------------------------------------------------------------------------------------

int32_t otaro_arena_create(int64_t bytes, otaro_arena** arena) {
    return guarded([&]() -> int {
        if (arena == nullptr || bytes < 0 || bytes > kMostBytes) return OTARO_ERROR_ARGUMENT;
        *arena = new otaro_arena{Arena(bytes)};
        return OTARO_OK;
    });
}

void otaro_arena_destroy(otaro_arena* arena) { delete arena; }

int32_t otaro_matrix_size(const otaro_format* format, int64_t rows, int64_t columns, int32_t mantissa, int64_t* bytes) {
    Checks checks(format, rows, columns);
    checks.require(bytes != nullptr && within(rows, kMostRows) && within(columns, kMostRows));
    checks.require(valid_mantissa(mantissa));
    if (checks.error() == OTARO_OK) *bytes = tiles_bytes(tiles_of(rows, columns, format->group_size), mantissa);
    return checks.error();
}

int32_t otaro_matrix_create(const otaro_format* format, int64_t rows, int64_t columns, otaro_matrix** matrix) {
    return guarded([&]() -> int {
        Checks checks(format, rows, columns);
        checks.require(matrix != nullptr && within(rows, kMostRows) && within(columns, kMostRows));
        checks.require(checks.error() == OTARO_OK && format->scheme == OTARO_NESTED);
        if (checks.error() != OTARO_OK) return checks.error();
        *matrix = new otaro_matrix{*format, Matrix(rows, columns, format->group_size)};
        return OTARO_OK;
    });
}

void otaro_matrix_destroy(otaro_matrix* matrix) { delete matrix; }

int32_t otaro_matrix_set_base(otaro_matrix* matrix, const otaro_planes* planes, otaro_arena* arena, int32_t threads) {
    return guarded([&]() -> int {
        if (matrix == nullptr || threads < 1 || threads > kMaxThreads) return OTARO_ERROR_ARGUMENT;
        const Tiles& tiles = matrix->matrix.tiles();
        Checks checks(&matrix->format, tiles.rows, tiles.columns);
        checks.planes(planes, 0);
        if (checks.error() == OTARO_OK) checks.scales(planes->scale, planes->scale_bytes);
        if (checks.error() != OTARO_OK) return checks.error();
        Arena* const home = arena == nullptr ? nullptr : &arena->arena;
        matrix->matrix.set_base(planes->base, planes->scale, home, threads);
        return OTARO_OK;
    });
}

int32_t otaro_matrix_set_bit(otaro_matrix* matrix, int32_t bit, const uint8_t* data, int64_t bytes, otaro_arena* arena,
                             int32_t threads) {
    return guarded([&]() -> int {
        if (matrix == nullptr || threads < 1 || threads > kMaxThreads) return OTARO_ERROR_ARGUMENT;
        if (bit <= kNarrowest || bit > kWidest) return OTARO_ERROR_ARGUMENT;
        const int plane = bit - kNarrowest - 1;
        if (data == nullptr) {
            matrix->matrix.drop_bit(plane);
            return OTARO_OK;
        }
        const Tiles& tiles = matrix->matrix.tiles();
        if (bytes < tiles.rows * padded_columns(tiles) / 8) return OTARO_ERROR_BUFFER;
        matrix->matrix.set_bit(plane, data, arena == nullptr ? nullptr : &arena->arena, threads);
        return OTARO_OK;
    });
}

int32_t otaro_matrix_bytes(const otaro_matrix* matrix, int64_t* bytes) {
    if (matrix == nullptr || bytes == nullptr) return OTARO_ERROR_ARGUMENT;
    *bytes = matrix->matrix.bytes();
    return OTARO_OK;
}

int32_t otaro_matrix_multiply(const otaro_matrix* matrix, int32_t mantissa, const float* x, int64_t x_bytes,
                              int64_t batch, const float* bias, int64_t bias_bytes, float* y, int64_t y_bytes,
                              int32_t fine, int32_t threads, int32_t isa) {
    return guarded([&]() -> int {
        if (matrix == nullptr || !valid_mantissa(mantissa)) return OTARO_ERROR_ARGUMENT;
        const Tiles& tiles = matrix->matrix.tiles();
        Checks checks(&matrix->format, tiles.rows, tiles.columns);
        checks.require(batch >= 0 && batch <= kMostRows && threads >= 1 && threads <= kMaxThreads);
        if (checks.error() != OTARO_OK) return checks.error();
        int64_t inputs = 0, outputs = 0;
        checks.require(!__builtin_mul_overflow(batch, tiles.columns, &inputs));
        checks.require(!__builtin_mul_overflow(batch, tiles.rows, &outputs));
        checks.buffer(x, x_bytes, inputs, sizeof *x);
        checks.buffer(y, y_bytes, outputs, sizeof *y);
        if (bias != nullptr) checks.buffer(bias, bias_bytes, tiles.rows, sizeof *bias);
        checks.require(matrix->matrix.holds(mantissa), OTARO_ERROR_PLANES);
        const EngineKernels* const kernels = engine_kernels_for(isa);
        checks.require(kernels != nullptr, OTARO_ERROR_ISA);
        if (checks.error() != OTARO_OK) return checks.error();
        const Workspace workspace(tiles, batch, fine != 0, threads);
        const Product product{&tiles, mantissa, &workspace.x(), batch, bias, y, tiles.rows, false};
        Team team(threads);
        team.run(batch, 1, [&](int, int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row) {
                kernels->quantize(x + row * tiles.columns, tiles.columns, mantissa, workspace.x(), row);
            }
        });
        team.run(batch == 0 ? 0 : tiles.tiles, 4, [&](int worker, int64_t first, int64_t last) {
            kernels->multiply(product, first, last, workspace.scratch(worker));
        });
        return OTARO_OK;
    });
}

// ---- models ---------------------------------------------------------------------------------------------------------

int32_t otaro_model_create(const otaro_model_config* config, otaro_model** model) {
    return guarded([&]() -> int {
        if (config == nullptr || model == nullptr) return OTARO_ERROR_ARGUMENT;
        const bool sizes = within(config->layers, kMostLayers) && within(config->hidden, kMostRows) &&
                           within(config->intermediate, kMostRows) && within(config->heads, kMostRows) &&
                           within(config->kv_heads, config->heads) && config->heads % config->kv_heads == 0 &&
                           within(config->head_dimension, kMostHeadDimension) && config->head_dimension % 2 == 0 &&
                           within(config->heads * config->head_dimension, kMostRows) &&
                           within(config->vocabulary, kMostRows - 1);
        const bool numbers = std::isfinite(config->norm_epsilon) && std::isfinite(config->rope_factor);
        if (!sizes || !numbers || config->rope_frequency == nullptr || config->window == nullptr) {
            return OTARO_ERROR_ARGUMENT;
        }
        const int64_t frequencies = config->head_dimension / 2 * static_cast<int64_t>(sizeof(float));
        const int64_t windows = config->layers * static_cast<int64_t>(sizeof(int64_t));
        if (config->rope_frequency_bytes < frequencies || config->window_bytes < windows) return OTARO_ERROR_BUFFER;
        *model = new otaro_model{Model(*config)};
        return OTARO_OK;
    });
}

void otaro_model_destroy(otaro_model* model) { delete model; }

int32_t otaro_model_set_matrix(otaro_model* model, int64_t layer, int32_t role, const otaro_matrix* matrix) {
    if (model == nullptr || matrix == nullptr || role < 0 || role >= OTARO_MATRIX_ROLES) return OTARO_ERROR_ARGUMENT;
    Layer* const place = model->model.layer(layer, of_whole_matrix(role));
    if (place == nullptr) return OTARO_ERROR_INDEX;
    const Tiles& tiles = matrix->matrix.tiles();
    if (std::pair(tiles.rows, tiles.columns) != model->model.shape(role)) return OTARO_ERROR_BUFFER;
    if (model->model.group_blocks != 0 && tiles.group_blocks != model->model.group_blocks) return OTARO_ERROR_ARGUMENT;
    model->model.group_blocks = tiles.group_blocks;
    place->matrices[role] = &matrix->matrix;
    return OTARO_OK;
}

int32_t otaro_model_set_vector(otaro_model* model, int64_t layer, int32_t role, const float* data, int64_t bytes) {
    return guarded([&]() -> int {
        if (model == nullptr || data == nullptr || role < 0 || role >= OTARO_VECTOR_ROLES) return OTARO_ERROR_ARGUMENT;
        Layer* const place = model->model.layer(layer, role == OTARO_FINAL_NORM);
        if (place == nullptr) return OTARO_ERROR_INDEX;
        const int64_t length = model->model.length(role);
        if (bytes != length * static_cast<int64_t>(sizeof *data)) return OTARO_ERROR_BUFFER;
        place->vectors[role].assign(data, data + length);
        return OTARO_OK;
    });
}

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

// ---- measuring ------------------------------------------------------------------------------------------------------

namespace {

// One stream after the other keeps too few reads under way: eight at once read half as fast again.
uint64_t read_words(const uint64_t* data, int64_t words) {
    constexpr int64_t kStreams = 8, kLine = 8;
#if defined(__GNUC__)
    constexpr int64_t kAhead = 16 * kLine;
#endif
    const int64_t length = words / kStreams / kLine * kLine;
    uint64_t sums[kStreams][kLine] = {};
    for (int64_t i = 0; i < length; i += kLine) {
        for (int64_t stream = 0; stream < kStreams; ++stream) {
            const uint64_t* line = data + stream * length + i;
#if defined(__GNUC__)
            if (i + kAhead < length) __builtin_prefetch(line + kAhead);
#endif
            for (int64_t j = 0; j < kLine; ++j) sums[stream][j] += line[j];
        }
    }
    uint64_t total = 0;
    for (const auto& sum : sums)
        for (const uint64_t each : sum) total += each;
    for (int64_t i = length * kStreams; i < words; ++i) total += data[i];
    return total;
}

} // namespace

int32_t otaro_read(const uint64_t* data, int64_t bytes, uint64_t* sum, int32_t threads) {
    return guarded([&]() -> int {
        if (data == nullptr || sum == nullptr || bytes < 0) return OTARO_ERROR_ARGUMENT;
        if (threads < 1 || threads > kMaxThreads) return OTARO_ERROR_ARGUMENT;
        const int64_t words = bytes / static_cast<int64_t>(sizeof *data);
        std::atomic<uint64_t> total{0};
        auto body = [&](int64_t first, int64_t last) { total += read_words(data + first, last - first); };
        parallel(threads, words, words / threads + 1, body);
        *sum = total;
        return OTARO_OK;
    });
}
