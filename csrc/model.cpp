#include "model.h"

#include <algorithm>
#include <cmath>
#include <new>

namespace otaro {
namespace {

constexpr int64_t kRangeBytes = 16384; // of base handed to a thread at a time: long enough to hide handing it out
constexpr int64_t kSmallWork = 16384;  // floats below which work outside products is not worth sharing

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A multiple of what kernels take side by side, but for matrices so small that threads would be left without work.
int64_t tile_grain(const Tiles& tiles, int64_t all_tiles, int threads) {
    const int64_t multiple = all_tiles >= 2 * kMostTiles * threads ? kMostTiles : 2;
    return round_up(std::max<int64_t>(1, kRangeBytes / (tiles.blocks * kBaseBytes)), multiple);
}

// Rows of activations in a range, for work of `length` floats a row: all of them where that is little.
int64_t row_grain(int64_t count, int64_t length) { return count * length < kSmallWork ? count : 1; }

} // namespace

Model::Model(const otaro_model_config& config)
    : hidden(config.hidden), intermediate(config.intermediate), heads(config.heads), kv_heads(config.kv_heads),
      head_dimension(config.head_dimension), vocabulary(config.vocabulary), norm_epsilon(config.norm_epsilon),
      rope_factor(config.rope_factor),
      rope_frequency(config.rope_frequency, config.rope_frequency + config.head_dimension / 2),
      layers(static_cast<size_t>(config.layers)) {
    for (size_t i = 0; i < layers.size(); ++i) layers[i].window = config.window[i];
}

Layer* Model::layer(int64_t index, bool of_whole) {
    if (of_whole) return index == 0 ? &whole : nullptr;
    return index >= 0 && index < static_cast<int64_t>(layers.size()) ? &layers[static_cast<size_t>(index)] : nullptr;
}

std::pair<int64_t, int64_t> Model::shape(int role) const {
    switch (role) {
    case OTARO_EMBEDDING:
    case OTARO_HEAD: return {vocabulary, hidden};
    case OTARO_QUERY: return {heads * head_dimension, hidden};
    case OTARO_KEY:
    case OTARO_VALUE: return {kv_heads * head_dimension, hidden};
    case OTARO_OUTPUT: return {hidden, heads * head_dimension};
    case OTARO_GATE:
    case OTARO_UP: return {intermediate, hidden};
    default: return {hidden, intermediate};
    }
}

int64_t Model::length(int vector_role) const {
    switch (vector_role) {
    case OTARO_QUERY_NORM:
    case OTARO_KEY_NORM: return head_dimension;
    case OTARO_QUERY_BIAS: return heads * head_dimension;
    case OTARO_KEY_BIAS:
    case OTARO_VALUE_BIAS: return kv_heads * head_dimension;
    case OTARO_GATE_BIAS:
    case OTARO_UP_BIAS: return intermediate;
    default: return hidden;
    }
}

bool Model::complete() const {
    if (whole.matrices[OTARO_EMBEDDING] == nullptr || whole.matrices[OTARO_HEAD] == nullptr) return false;
    if (whole.vector(OTARO_FINAL_NORM) == nullptr) return false;
    for (const Layer& layer : layers) {
        for (int role = OTARO_QUERY; role <= OTARO_DOWN; ++role) {
            if (layer.matrices[role] == nullptr) return false;
        }
        if (layer.vector(OTARO_ATTENTION_NORM) == nullptr || layer.vector(OTARO_FEED_FORWARD_NORM) == nullptr) {
            return false;
        }
    }
    return true;
}

// ---- a session's memory ---------------------------------------------------------------------------------------------

// Bytes of the keys of a layer, or scores, far beyond any machine, so that no product of sizes overflows.
constexpr int64_t kMostCached = int64_t{1} << 44;

template <class T> Memory<T> Session::room(int64_t count, Bytes (*take)(int64_t bytes)) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    bytes_ += bytes;
    return counting_ ? Memory<T>() : owned<T>(take(bytes));
}

Session::Session(const Model& model, int64_t context, int cache_mantissa, const EngineKernels& kernels)
    : Session(model, model.group_blocks * kBlockColumns, context, cache_mantissa, kernels, false) {}

Session::Session(const Model& model, int group_size, int64_t context, int cache_mantissa, const EngineKernels& kernels,
                 bool counting)
    : model_(model), kernels_(kernels), context_(context), capacity_(round_up(context, kKeyBlock)),
      cache_(cache_layout(cache_mantissa, static_cast<int>(model.head_dimension))), counting_(counting) {
    const int64_t heads_per_key = model.heads / model.kv_heads;
    int64_t cached, scores;
    if (__builtin_mul_overflow(model.kv_heads * cache_.row_bytes, capacity_, &cached) || cached > kMostCached ||
        __builtin_mul_overflow(heads_per_key * kQueryBlock, capacity_, &scores) || scores > kMostCached)
        throw std::bad_alloc();
    const int64_t query = model.heads * model.head_dimension, key = model.kv_heads * model.head_dimension;
    const int64_t half = model.head_dimension / 2;
    x_ = room<float>(kMostTokens * model.hidden);
    normed_ = room<float>(kMostTokens * model.hidden);
    query_ = room<float>(kMostTokens * query);
    key_ = room<float>(kMostTokens * key);
    value_ = room<float>(kMostTokens * key);
    attended_ = room<float>(kMostTokens * query);
    gate_ = room<float>(kMostTokens * model.intermediate);
    up_ = room<float>(kMostTokens * model.intermediate);
    cosine_ = room<float>(kMostTokens * half);
    sine_ = room<float>(kMostTokens * half);
    for (int role = OTARO_HEAD; role <= OTARO_DOWN; ++role) {
        const auto [rows, columns] = model.shape(role);
        const Tiles tiles = tiles_of(rows, columns, group_size);
        widest_ = std::max(widest_, padded_columns(tiles));
        scratch_bytes_ = std::max(scratch_bytes_, product_scratch(tiles));
    }
    for (size_t i = 0; i < model.layers.size(); ++i) {
        keys_.push_back(room<uint8_t>(cached, reserve_bytes));
        values_.push_back(room<uint8_t>(cached, reserve_bytes));
        cache_bytes_ += 2 * cached;
    }
    quantized_.coarse = room<int8_t>(kMostTokens * widest_);
    quantized_.fine = room<int8_t>(kMostTokens * widest_);
    quantized_.words = room<int16_t>(kMostTokens * widest_);
    quantized_.scale = room<float>(kMostTokens * widest_ / kBlockColumns);
    quantized_.offset = room<float>(kMostTokens * widest_ / kBlockColumns);
    score_count_ = attention_scratch(cache_, capacity_, heads_per_key);
}

Session::Sizes Session::sizes(const Model& model, int group_size, int64_t context, int cache_mantissa, int threads) {
    Session counted(model, group_size, context, cache_mantissa, *engine_kernels_ref, true);
    counted.reserve_scratch(threads);
    counted.room<float>(model.vocabulary); // for drafts
    return counted.sizes();
}

void Session::reserve_scratch(int threads) {
    while (static_cast<int>(scratch_.size()) < threads) scratch_.push_back(room<uint8_t>(scratch_bytes_));
    while (static_cast<int>(scores_.size()) < threads) scores_.push_back(room<float>(score_count_, reserve_bytes));
}

int64_t Session::cache_in_use() const {
    const int64_t head = whole_pages(round_up(written_, kKeyBlock) * cache_.row_bytes);
    return std::min(cache_bytes_, 2 * static_cast<int64_t>(model_.layers.size()) * model_.kv_heads * head);
}

void Session::release(int64_t length) {
    length_ = std::min(length_, length);
    if (length >= written_) return;
    const int64_t from = round_up(length, kKeyBlock) * cache_.row_bytes, head = capacity_ * cache_.row_bytes;
    for (const auto* const rows : {&keys_, &values_}) {
        for (const Memory<uint8_t>& layer : *rows) {
            for (int64_t h = 0; h < model_.kv_heads; ++h) give_back(layer.get() + h * head + from, head - from);
        }
    }
    written_ = length;
}

// Whether a product takes its activations in 16 bits, if not all are to. Next to weights of 8 or 9 bits, 8 would show. At
// narrower widths they cost perplexity (0.5 % on SmolLM2) mostly through attention and the head, a small part of all
// products. A draft is checked anyway.
bool Session::fine(int role, int mantissa) const {
    return !drafting_ && (fine_ || mantissa >= 7 || role == OTARO_QUERY || role == OTARO_HEAD);
}

Activations Session::activations(const Matrix& matrix, bool fine) const {
    return {
        quantized_.coarse.get(), fine ? quantized_.fine.get() : nullptr, quantized_.words.get(), quantized_.scale.get(),
        quantized_.offset.get(), padded_columns(matrix.tiles()),         matrix.tiles().blocks};
}

// ---- running --------------------------------------------------------------------------------------------------------

int Session::check(const int32_t* tokens, int64_t count, int64_t position, const uint8_t* mantissa) const {
    const int64_t layers = static_cast<int64_t>(model_.layers.size());
    if (position > length_ || count > context_ - position) return OTARO_ERROR_INDEX;
    for (int64_t i = 0; i < count; ++i) {
        if (tokens[i] < 0 || tokens[i] >= model_.vocabulary) return OTARO_ERROR_INDEX;
    }
    if (!model_.whole.matrices[OTARO_EMBEDDING]->holds(mantissa[0])) return OTARO_ERROR_PLANES;
    if (!model_.whole.matrices[OTARO_HEAD]->holds(mantissa[layers + 1])) return OTARO_ERROR_PLANES;
    for (int64_t i = 0; i < layers; ++i) {
        for (int role = OTARO_QUERY; role <= OTARO_DOWN; ++role) {
            if (!model_.layers[static_cast<size_t>(i)].matrices[role]->holds(mantissa[i + 1]))
                return OTARO_ERROR_PLANES;
        }
    }
    return OTARO_OK;
}

int Session::run(const int32_t* tokens, int64_t count, int64_t position, const uint8_t* mantissa, float* logits,
                 int64_t logits_count, int threads) {
    const int error = check(tokens, count, position, mantissa);
    if (error != OTARO_OK) return error;
    reserve_scratch(threads);
    Team team(threads);
    for (int64_t done = 0; done < count; done += kMostTokens) {
        const int64_t part = std::min(kMostTokens, count - done);
        position_ = position + done;
        length_ = position_; // should anything go wrong, these are not there
        run_tokens(team, tokens + done, part, mantissa);
        length_ = position_ + part;
        const int64_t first = std::max(count - logits_count - done, int64_t{0});
        if (first < part) {
            float* const to = logits + (done + first - (count - logits_count)) * model_.vocabulary;
            head(team, first, part - first, mantissa[model_.layers.size() + 1], model_.vocabulary, to);
        }
    }
    return OTARO_OK;
}

// Likeliest tokens one after another, all with 8 bits of activations.
int Session::draft(int32_t token, int64_t position, const uint8_t* mantissa, int64_t rows, float margin,
                   int32_t* drafts, int64_t* count, int threads) {
    const int64_t most = *count;
    *count = 0;
    const int error = check(&token, 1, position, mantissa);
    if (error != OTARO_OK) return error;
    if (most > context_ - position) return OTARO_ERROR_INDEX;
    reserve_scratch(threads);
    if (!draft_logits_) draft_logits_ = room<float>(model_.vocabulary);
    const float* const logits = draft_logits_.get();
    Team team(threads);
    drafting_ = true;
    while (*count < most) {
        length_ = position_ = position + *count;
        run_tokens(team, &token, 1, mantissa);
        ++length_;
        head(team, 0, 1, mantissa[model_.layers.size() + 1], rows, draft_logits_.get());
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

void Session::run_tokens(Team& team, const int32_t* tokens, int64_t count, const uint8_t* mantissa) {
    written_ = std::max(written_, position_ + count);
    const Matrix& embedding = *model_.whole.matrices[OTARO_EMBEDDING];
    const int64_t half = model_.head_dimension / 2;
    team.run(count, row_grain(count, 4 * model_.hidden), [&](int, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            embedding.row(tokens[row], mantissa[0], x_.get() + row * model_.hidden);
            for (int64_t i = 0; i < half; ++i) {
                const float angle = static_cast<float>(position_ + row) * model_.rope_frequency[static_cast<size_t>(i)];
                cosine_[row * half + i] = std::cos(angle) * model_.rope_factor;
                sine_[row * half + i] = std::sin(angle) * model_.rope_factor;
            }
        }
    });
    for (size_t i = 0; i < model_.layers.size(); ++i) {
        attention(team, model_.layers[i], static_cast<int64_t>(i), count, mantissa[i + 1]);
        feed_forward(team, model_.layers[i], count, mantissa[i + 1]);
    }
}

void Session::norm_and_quantize(Team& team, const float* x, int64_t count, const float* weight, const Activations& to,
                                int mantissa) {
    team.run(count, row_grain(count, model_.hidden), [&](int, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            float* const normed = normed_.get() + row * model_.hidden;
            kernels_.normalize(x + row * model_.hidden, weight, model_.hidden, model_.norm_epsilon, normed);
            kernels_.quantize(normed, model_.hidden, mantissa, to, row);
        }
    });
}

// Several matrices with the same activations, their tiles in one row for the team.
void Session::multiply(Team& team, std::initializer_list<Product> products) {
    int64_t tiles = 0;
    for (const Product& product : products) tiles += product.weight->tiles;
    const int64_t grain = tile_grain(*products.begin()->weight, tiles, team.threads());
    team.run(tiles, grain, [&](int worker, int64_t first, int64_t last) {
        int64_t start = 0;
        for (const Product& product : products) {
            const int64_t from = std::max(first - start, int64_t{0}),
                          to = std::min(last - start, product.weight->tiles);
            if (from < to) kernels_.multiply(product, from, to, scratch_[static_cast<size_t>(worker)].get());
            start += product.weight->tiles;
        }
    });
}

void Session::attention(Team& team, const Layer& layer, int64_t index, int64_t count, int mantissa) {
    const int64_t dimension = model_.head_dimension, half = dimension / 2;
    const int64_t query_stride = model_.heads * dimension, key_stride = model_.kv_heads * dimension;
    const Matrix &query = *layer.matrices[OTARO_QUERY], &key = *layer.matrices[OTARO_KEY];
    const Activations x = activations(query, fine(OTARO_QUERY, mantissa));
    norm_and_quantize(team, x_.get(), count, layer.vector(OTARO_ATTENTION_NORM), x, mantissa);
    multiply(team,
             {{&query.tiles(), mantissa, &x, count, layer.vector(OTARO_QUERY_BIAS), query_.get(), query_stride, false},
              {&key.tiles(), mantissa, &x, count, layer.vector(OTARO_KEY_BIAS), key_.get(), key_stride, false},
              {&layer.matrices[OTARO_VALUE]->tiles(), mantissa, &x, count, layer.vector(OTARO_VALUE_BIAS), value_.get(),
               key_stride, false}});

    uint8_t* const keys = keys_[static_cast<size_t>(index)].get();
    uint8_t* const values = values_[static_cast<size_t>(index)].get();
    const auto keep = [&](const float* head_key, const float* head_value, int64_t head, int64_t position) {
        const int64_t place = head * capacity_ * cache_.row_bytes;
        if (cache_.mantissa == 0) {
            kernels_.store_keys(head_key, head_value, cache_.dimension, cache_.padded_dimension, position,
                                reinterpret_cast<Half*>(keys + place), reinterpret_cast<Half*>(values + place));
        } else {
            kernels_.encode_row(head_key, cache_, keys + place + position * cache_.row_bytes);
            kernels_.encode_row(head_value, cache_, values + place + position * cache_.row_bytes);
        }
    };
    const auto prepare = [&](float* heads, int64_t number, const float* norm, int64_t row) {
        for (int64_t h = 0; norm != nullptr && h < number; ++h) {
            kernels_.normalize(heads + h * dimension, norm, dimension, model_.norm_epsilon, heads + h * dimension);
        }
        kernels_.rotate(heads, number, static_cast<int>(dimension), cosine_.get() + row * half,
                        sine_.get() + row * half);
    };
    team.run(count, row_grain(count, query_stride + key_stride), [&](int, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            float* const row_key = key_.get() + row * key_stride;
            prepare(query_.get() + row * query_stride, model_.heads, layer.vector(OTARO_QUERY_NORM), row);
            prepare(row_key, model_.kv_heads, layer.vector(OTARO_KEY_NORM), row);
            for (int64_t h = 0; h < model_.kv_heads; ++h) {
                keep(row_key + h * dimension, value_.get() + row * key_stride + h * dimension, h, position_ + row);
            }
        }
    });

    const Attention job{query_.get(),
                        query_stride,
                        keys,
                        values,
                        cache_,
                        capacity_,
                        static_cast<int>(dimension),
                        cache_.padded_dimension,
                        static_cast<int>(model_.heads),
                        static_cast<int>(model_.kv_heads),
                        position_,
                        count,
                        layer.window > 0 ? layer.window : capacity_,
                        1.0f / std::sqrt(static_cast<float>(dimension)),
                        attended_.get(),
                        query_stride};
    const int64_t seen = std::min(position_ + count, job.window) * dimension * count;
    const int64_t grain = seen < kSmallWork / 8 ? attention_tasks(job) : 1;
    team.run(attention_tasks(job), grain, [&](int worker, int64_t first, int64_t last) {
        const auto attend = cache_.mantissa == 0 ? kernels_.attend : kernels_.attend_coded;
        attend(job, first, last, scores_[static_cast<size_t>(worker)].get());
    });

    const Matrix& output = *layer.matrices[OTARO_OUTPUT];
    const Activations to_output = activations(output, fine(OTARO_OUTPUT, mantissa));
    team.run(count, row_grain(count, query_stride), [&](int, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            kernels_.quantize(attended_.get() + row * query_stride, query_stride, mantissa, to_output, row);
        }
    });
    multiply(team, {{&output.tiles(), mantissa, &to_output, count, layer.vector(OTARO_OUTPUT_BIAS), x_.get(),
                     model_.hidden, true}});
}

void Session::feed_forward(Team& team, const Layer& layer, int64_t count, int mantissa) {
    const Matrix &gate = *layer.matrices[OTARO_GATE], &up = *layer.matrices[OTARO_UP],
                 &down = *layer.matrices[OTARO_DOWN];
    const Activations x = activations(gate, fine(OTARO_GATE, mantissa));
    norm_and_quantize(team, x_.get(), count, layer.vector(OTARO_FEED_FORWARD_NORM), x, mantissa);
    const int64_t inner = model_.intermediate;
    multiply(team, {{&gate.tiles(), mantissa, &x, count, layer.vector(OTARO_GATE_BIAS), gate_.get(), inner, false},
                    {&up.tiles(), mantissa, &x, count, layer.vector(OTARO_UP_BIAS), up_.get(), inner, false}});
    const Activations to_down = activations(down, fine(OTARO_DOWN, mantissa));
    team.run(count, row_grain(count, 2 * inner), [&](int, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            float* const product = gate_.get() + row * inner;
            kernels_.swiglu(product, up_.get() + row * inner, inner, product);
            kernels_.quantize(product, inner, mantissa, to_down, row);
        }
    });
    multiply(team, {{&down.tiles(), mantissa, &to_down, count, layer.vector(OTARO_DOWN_BIAS), x_.get(), model_.hidden,
                     true}});
}

// The first `rows` logits of each token.
void Session::head(Team& team, int64_t first, int64_t count, int mantissa, int64_t rows, float* logits) {
    const Matrix& matrix = *model_.whole.matrices[OTARO_HEAD];
    Tiles tiles = matrix.tiles();
    tiles.rows = rows;
    tiles.tiles = (rows + kTileRows - 1) / kTileRows;
    const Activations x = activations(matrix, fine(OTARO_HEAD, mantissa));
    norm_and_quantize(team, x_.get() + first * model_.hidden, count, model_.whole.vector(OTARO_FINAL_NORM), x,
                      mantissa);
    multiply(team, {{&tiles, mantissa, &x, count, nullptr, logits, rows, false}});
}

} // namespace otaro
