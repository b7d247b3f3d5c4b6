// A decoder of the Llama kind, and a session that runs it.
//
//     x = embedding[token]
//     each layer:  x += output(attention(rotate(query(n)), rotate(key(n)), value(n))),   n = norm(x)
//                  x += down(silu(gate(n)) * up(n)),                                     n = norm(x)
//     logits = head(norm(x))
//
// with query and key normed a head at a time where the model has such norms, and biases where it has them.
#pragma once

#include <vector>

#include "engine_kernels.h"
#include "matrix.h"
#include "otaro_engine.h"
#include "threads.h"

namespace otaro {

constexpr int64_t kMostLayers = 4096;
constexpr int64_t kMostTokens = 128; // run at a time; more are split

struct Layer {
    const Matrix* matrices[OTARO_MATRIX_ROLES] = {};
    std::vector<float> vectors[OTARO_VECTOR_ROLES];
    int64_t window = 0;

    const float* vector(int role) const { return vectors[role].empty() ? nullptr : vectors[role].data(); }
};

struct Model {
    int64_t hidden, intermediate, heads, kv_heads, head_dimension, vocabulary;
    float norm_epsilon, rope_factor;
    std::vector<float> rope_frequency;
    std::vector<Layer> layers;
    Layer whole;          // embedding, head, final norm
    int group_blocks = 0; // of every matrix: those that share activations must divide them alike

    Model(const otaro_model_config& config);
    Layer* layer(int64_t index, bool of_whole);
    // The shape a matrix must have: {rows, columns}.
    std::pair<int64_t, int64_t> shape(int role) const;
    int64_t length(int vector_role) const;
    bool complete() const;
};

class Session {
  public:
    // `cache_mantissa` 0 keeps keys and values as float16.
    Session(const Model& model, int64_t context, int cache_mantissa, const EngineKernels& kernels);

    struct Sizes {
        int64_t cache, work; // bytes: keys and values of the whole context, and everything else
    };
    // What a session would take; the model needs no matrices for that.
    static Sizes sizes(const Model& model, int group_size, int64_t context, int cache_mantissa, int threads);

    int run(const int32_t* tokens, int64_t count, int64_t position, const uint8_t* mantissa, float* logits,
            int64_t logits_count, int threads);
    int draft(int32_t token, int64_t position, const uint8_t* mantissa, int64_t rows, float margin, int32_t* drafts,
              int64_t* count, int threads);
    void set_fine(bool fine) { fine_ = fine; }
    void release(int64_t length); // forgets positions from `length` on and gives their memory back
    Sizes sizes() const { return {cache_bytes_, bytes_ - cache_bytes_}; }
    int64_t cache_in_use() const; // bytes of the cache that have been written to and not been given back
    const Model& model() const { return model_; }

  private:
    struct Quantized { // room for kMostTokens rows of activations
        Memory<int8_t> coarse, fine;
        Memory<int16_t> words;
        Memory<float> scale, offset;
    };

    Session(const Model& model, int group_size, int64_t context, int cache_mantissa, const EngineKernels& kernels,
            bool counting);

    int check(const int32_t* tokens, int64_t count, int64_t position, const uint8_t* mantissa) const;
    bool fine(int role, int mantissa) const;
    void run_tokens(Team& team, const int32_t* tokens, int64_t count, const uint8_t* mantissa);
    void attention(Team& team, const Layer& layer, int64_t index, int64_t count, int mantissa);
    void feed_forward(Team& team, const Layer& layer, int64_t count, int mantissa);
    void head(Team& team, int64_t first, int64_t count, int mantissa, int64_t rows, float* logits);

    Activations activations(const Matrix& matrix, bool fine) const;
    void norm_and_quantize(Team& team, const float* x, int64_t count, const float* weight, const Activations& to,
                           int mantissa);
    void multiply(Team& team, std::initializer_list<Product> products);
    void reserve_scratch(int threads);
    template <class T> Memory<T> room(int64_t count, Bytes (*take)(int64_t bytes) = allocate_bytes);

    const Model& model_;
    const EngineKernels& kernels_;
    int64_t context_, capacity_;
    Cache cache_;
    int64_t length_ = 0, position_ = 0; // positions filled; the first of those being run
    int64_t written_ = 0;               // positions whose memory has been taken
    bool drafting_ = false, fine_ = false;
    bool counting_; // bytes, without taking them
    int64_t bytes_ = 0, cache_bytes_ = 0;
    int64_t scratch_bytes_ = 0, score_count_ = 0, widest_ = 0;
    Memory<float> x_, normed_, query_, key_, value_, attended_, gate_, up_, cosine_, sine_, draft_logits_;
    std::vector<Memory<uint8_t>> keys_, values_; // by layer
    Quantized quantized_;
    std::vector<Memory<uint8_t>> scratch_; // by worker: an unpacked tile
    std::vector<Memory<float>> scores_;    // by worker
};

} // namespace otaro
