// What a model computes, layer by layer, with the rows that `Work` has arranged.

#include <algorithm>
#include <cmath>

#include "work.h"

namespace otaro {
namespace {

constexpr int64_t kRangeBytes = 16384; // of base handed to a thread at a time: long enough to hide handing it out
constexpr int64_t kSmallWork = 4096;   // floats below which work outside products is not worth sharing
constexpr int64_t kSmallTask = 2048;   // floats of keys that are worth handing to a thread

// A multiple of what kernels take side by side, but for matrices so small that threads would be left without work. With
// several rows tiles are multiplied one or two at a time.
int64_t tile_grain(const Tiles& tiles, int64_t all_tiles, int64_t rows, int threads) {
    if (rows > 1) return 2;
    const int64_t multiple = all_tiles >= 2 * kMostTiles * threads ? kMostTiles : 2;
    return round_up(std::max<int64_t>(1, kRangeBytes / (tiles.blocks * kBaseBytes)), multiple);
}

// Rows of activations in a range, for work of `length` floats a row: all of them where that is little, else two ranges for
// each thread.
int64_t row_grain(int64_t count, int64_t length, int threads) {
    return count * length < kSmallWork ? count : std::max<int64_t>(1, count / (2 * threads));
}

} // namespace

// Whether a product takes its activations in 16 bits, if not all are to. Next to weights of 8 or 9 bits, 8 would show. At
// narrower widths they cost perplexity (0.5 % on SmolLM2) mostly through attention and the head, a small part of all
// products. A draft is checked anyway.
bool Work::fine(int role, int mantissa) const {
    return !drafting_ && (fine_ || mantissa >= 7 || role == OTARO_QUERY || role == OTARO_HEAD);
}

Activations Work::activations(const Matrix& matrix, bool fine, int mantissa, int64_t row, int64_t count) const {
    const Tiles& tiles = matrix.tiles();
    const int64_t columns = padded_columns(tiles), stride = scale_stride(tiles.blocks);
    const int span = span_blocks(tiles, fine, mantissa);
    return {quantized_.coarse.get() + row * columns,
            fine ? quantized_.fine.get() + row * columns : nullptr,
            quantized_.words.get() + row * columns,
            quantized_.scale.get() + row * stride,
            quantized_.offset.get() + row * stride,
            columns,
            tiles.blocks / span,
            stride,
            span,
            rows_together(count)};
}

void Work::embed(Team& team) {
    const Matrix& embedding = *model_.whole.matrices[OTARO_EMBEDDING];
    const int64_t half = model_.head_dimension / 2;
    team.run(rows_, row_grain(rows_, 4 * model_.hidden, team.threads()), [&](int, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const Part& part = parts_[static_cast<size_t>(part_of_[row])];
            const int64_t number = row - part.first, angles = (part.origin + number) * half;
            embedding.row(part.tokens[number], part.mantissa[0], x_.get() + row * model_.hidden);
            for (int64_t i = 0; i < half; ++i) {
                const float angle =
                    static_cast<float>(part.position + number) * model_.rope_frequency[static_cast<size_t>(i)];
                cosine_[angles + i] = std::cos(angle) * model_.rope_factor;
                sine_[angles + i] = std::sin(angle) * model_.rope_factor;
            }
        }
    });
}

// Where each group's activations for a matrix go.
void Work::quantize_for(const Matrix& matrix, int role) {
    int64_t row = 0;
    for (Group& group : groups_) {
        group.x = activations(matrix, fine(role, group.mantissa), group.mantissa, row, group.count);
        row += round_up(group.count, kRowsTogether);
    }
}

// Every row of `length` floats that `prepare(row)` gives, quantised for its group's width; `cost` floats of work a row.
template <class Prepare> void Work::quantize(Team& team, int64_t length, int64_t cost, const Prepare& prepare) {
    team.run(rows_, row_grain(rows_, cost, team.threads()), [&](int, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const Group& group = groups_[static_cast<size_t>(group_of_[row])];
            kernels_.quantize(prepare(row), length, group.mantissa, group.x, row - group.first);
        }
    });
}

// All of `products_`, their tiles in one row for the team. Those of one matrix come one after another, so that narrow widths
// find in the cache what wider ones read as well.
void Work::multiply(Team& team) {
    int64_t tiles = 0, rows = 0;
    for (const Product& product : products_) {
        tiles += product.weight->tiles;
        rows = std::max(rows, product.batch);
    }
    const int64_t grain = tile_grain(*products_.front().weight, tiles, rows, team.threads());
    const auto range = [&](int worker, int64_t first, int64_t last) {
        int64_t start = 0;
        for (const Product& product : products_) {
            const int64_t from = std::max(first - start, int64_t{0}),
                          to = std::min(last - start, product.weight->tiles);
            if (from < to) kernels_.multiply(product, from, to, scratch_[static_cast<size_t>(worker)].get());
            start += product.weight->tiles;
        }
    };
    team.run(tiles, grain, range, true);
}

// Several matrices of a layer with the activations at hand, each width's rows with its own planes.
void Work::project(Team& team, const Layer& layer, std::initializer_list<Projection> projections) {
    products_.clear();
    for (const Projection& to : projections) {
        for (const Group& group : groups_) {
            products_.push_back({&layer.matrices[to.role]->tiles(), group.mantissa, &group.x, group.count,
                                 layer.vector(to.bias), to.y + group.first * to.stride, to.stride, to.add});
        }
    }
    multiply(team);
}

float* Work::normed(int64_t row, const float* weight) {
    float* const result = normed_.get() + row * model_.hidden;
    kernels_.normalize(x_.get() + row * model_.hidden, weight, model_.hidden, model_.norm_epsilon, result);
    return result;
}

void Work::attention(Team& team, const Layer& layer, size_t index) {
    const int64_t dimension = model_.head_dimension, half = dimension / 2, hidden = model_.hidden;
    const int64_t query_stride = model_.heads * dimension, key_stride = model_.kv_heads * dimension;
    quantize_for(*layer.matrices[OTARO_QUERY], OTARO_QUERY);
    quantize(team, hidden, hidden, [&](int64_t row) { return normed(row, layer.vector(OTARO_ATTENTION_NORM)); });
    project(team, layer,
            {{OTARO_QUERY, OTARO_QUERY_BIAS, query_.get(), query_stride, false},
             {OTARO_KEY, OTARO_KEY_BIAS, key_.get(), key_stride, false},
             {OTARO_VALUE, OTARO_VALUE_BIAS, value_.get(), key_stride, false}});

    const auto keep = [&](const Session& session, const float* key, const float* value, int64_t head,
                          int64_t position) {
        const Cache& cache = session.cache();
        const int64_t place = head * session.capacity() * cache.row_bytes;
        uint8_t *const keys = session.keys(index) + place, *const values = session.values(index) + place;
        if (cache.mantissa == 0) {
            kernels_.store_keys(key, value, cache.dimension, cache.padded_dimension, position,
                                reinterpret_cast<Half*>(keys), reinterpret_cast<Half*>(values));
        } else {
            kernels_.encode_row(key, cache, keys + position * cache.row_bytes);
            kernels_.encode_row(value, cache, values + position * cache.row_bytes);
        }
    };
    const auto turn = [&](float* heads, int64_t number, const float* norm, int64_t angles) {
        for (int64_t h = 0; norm != nullptr && h < number; ++h) {
            kernels_.normalize(heads + h * dimension, norm, dimension, model_.norm_epsilon, heads + h * dimension);
        }
        kernels_.rotate(heads, number, static_cast<int>(dimension), cosine_.get() + angles * half,
                        sine_.get() + angles * half);
    };
    team.run(rows_, row_grain(rows_, query_stride + key_stride, team.threads()), [&](int, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const Part& part = parts_[static_cast<size_t>(part_of_[row])];
            const int64_t number = row - part.first;
            float* const key = key_.get() + row * key_stride;
            turn(query_.get() + row * query_stride, model_.heads, layer.vector(OTARO_QUERY_NORM), part.origin + number);
            turn(key, model_.kv_heads, layer.vector(OTARO_KEY_NORM), part.origin + number);
            for (int64_t h = 0; h < model_.kv_heads; ++h) {
                keep(*part.session, key + h * dimension, value_.get() + row * key_stride + h * dimension, h,
                     part.position + number);
            }
        }
    });
    attend(team, layer, index);

    quantize_for(*layer.matrices[OTARO_OUTPUT], OTARO_OUTPUT);
    quantize(team, query_stride, query_stride, [&](int64_t row) { return attended_.get() + row * query_stride; });
    project(team, layer, {{OTARO_OUTPUT, OTARO_OUTPUT_BIAS, x_.get(), hidden, true}});
}

// Every text with its own keys and values, the tasks of all of them in one row for the team.
void Work::attend(Team& team, const Layer& layer, size_t index) {
    const int64_t dimension = model_.head_dimension, stride = model_.heads * dimension;
    int64_t tasks = 0, work = 0; // work: floats of keys that are read
    jobs_.clear();
    for (const Part& part : parts_) {
        const Session& session = *part.session;
        jobs_.push_back(
            {query_.get() + part.first * stride, stride, session.keys(index), session.values(index), session.cache(),
             session.capacity(), static_cast<int>(dimension), session.cache().padded_dimension,
             static_cast<int>(model_.heads), static_cast<int>(model_.kv_heads), part.position, part.count,
             layer.window > 0 ? layer.window : session.capacity(), 1.0f / std::sqrt(static_cast<float>(dimension)),
             attended_.get() + part.first * stride, stride});
        const Attention& job = jobs_.back();
        tasks += attention_tasks(job);
        work += std::min(part.position + part.count, job.window) * dimension * part.count * model_.heads;
    }
    const int64_t enough = (kSmallTask * tasks + work - 1) / work; // tasks
    const int64_t grain = work < kSmallWork ? tasks : enough;
    team.run(tasks, grain, [&](int worker, int64_t first, int64_t last) {
        float* const scores = scores_[static_cast<size_t>(worker)].get();
        int64_t start = 0;
        for (const Attention& job : jobs_) {
            const int64_t count = attention_tasks(job);
            const int64_t from = std::max(first - start, int64_t{0}), to = std::min(last - start, count);
            if (from < to) (job.cache.mantissa == 0 ? kernels_.attend : kernels_.attend_coded)(job, from, to, scores);
            start += count;
            if (start >= last) break;
        }
    });
}

void Work::feed_forward(Team& team, const Layer& layer) {
    const int64_t inner = model_.intermediate, hidden = model_.hidden;
    quantize_for(*layer.matrices[OTARO_GATE], OTARO_GATE);
    quantize(team, hidden, hidden, [&](int64_t row) { return normed(row, layer.vector(OTARO_FEED_FORWARD_NORM)); });
    project(
        team, layer,
        {{OTARO_GATE, OTARO_GATE_BIAS, gate_.get(), inner, false}, {OTARO_UP, OTARO_UP_BIAS, up_.get(), inner, false}});
    quantize_for(*layer.matrices[OTARO_DOWN], OTARO_DOWN);
    quantize(team, inner, 2 * inner, [&](int64_t row) {
        float* const product = gate_.get() + row * inner;
        kernels_.swiglu(product, up_.get() + row * inner, inner, product);
        return product;
    });
    project(team, layer, {{OTARO_DOWN, OTARO_DOWN_BIAS, x_.get(), hidden, true}});
}

// The first `rows` logits of the rows `sources_` of activations, all of one width.
void Work::head(Team& team, int mantissa, int64_t rows, float* logits, int64_t stride) {
    const Matrix& matrix = *model_.whole.matrices[OTARO_HEAD];
    const int64_t count = static_cast<int64_t>(sources_.size());
    Tiles tiles = matrix.tiles();
    tiles.rows = rows;
    tiles.tiles = (rows + kTileRows - 1) / kTileRows;
    const Activations x = activations(matrix, fine(OTARO_HEAD, mantissa), mantissa, 0, count);
    team.run(count, row_grain(count, model_.hidden, team.threads()), [&](int, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            float* const normed = normed_.get() + row * model_.hidden;
            kernels_.normalize(x_.get() + sources_[static_cast<size_t>(row)] * model_.hidden,
                               model_.whole.vector(OTARO_FINAL_NORM), model_.hidden, model_.norm_epsilon, normed);
            kernels_.quantize(normed, model_.hidden, mantissa, x, row);
        }
    });
    products_.assign(1, {&tiles, mantissa, &x, count, nullptr, logits, stride, false});
    multiply(team);
}

} // namespace otaro
