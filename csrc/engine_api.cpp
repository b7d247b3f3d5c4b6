// The engine's C ABI, matrices and models: checks every setting and the size of every buffer.

#include <atomic>
#include <cmath>
#include <vector>

#include "handles.h"
#include "threads.h"

using namespace otaro;

namespace {

constexpr int64_t kMostBytes = int64_t{1} << 46; // of planes, far beyond any machine

bool of_whole_matrix(int32_t role) { return role == OTARO_EMBEDDING || role == OTARO_HEAD; }

// Room for a product outside a session.
class Workspace {
  public:
    Workspace(const Tiles& tiles, int64_t batch, bool fine, int mantissa, int threads)
        : coarse_(allocate<int8_t>(round_up(batch, kRowsTogether) * padded_columns(tiles))),
          fine_(allocate<int8_t>(fine ? round_up(batch, kRowsTogether) * padded_columns(tiles) : 0)),
          words_(allocate<int16_t>(fine ? round_up(batch, kRowsTogether) * padded_columns(tiles) : 0)),
          scale_(allocate<float>(batch * scale_stride(tiles.blocks))),
          offset_(allocate<float>(batch * scale_stride(tiles.blocks))) {
        for (int i = 0; i < threads; ++i) scratch_.push_back(allocate<uint8_t>(product_scratch(tiles)));
        const int span = span_blocks(tiles, fine, mantissa);
        x_ = {coarse_.get(), fine ? fine_.get() : nullptr, words_.get(),        scale_.get(),
              offset_.get(), padded_columns(tiles),        tiles.blocks / span, scale_stride(tiles.blocks),
              span,          rows_together(batch)};
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
        const Workspace workspace(tiles, batch, fine != 0, mantissa, threads);
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
