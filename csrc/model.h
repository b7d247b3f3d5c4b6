// A decoder of the Llama kind: what its matrices and vectors are. `work.h` runs it.
//
//     x = embedding[token]
//     each layer:  x += output(attention(rotate(query(n)), rotate(key(n)), value(n))),   n = norm(x)
//                  x += down(silu(gate(n)) * up(n)),                                     n = norm(x)
//     logits = head(norm(x))
//
// with query and key normed a head at a time where the model has such norms, and biases where it has them.
#pragma once

#include <vector>

#include "matrix.h"
#include "otaro_engine.h"

namespace otaro {

constexpr int64_t kMostLayers = 4096;

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
    // Whether the planes of all these widths are there: of the embedding, of each layer, of the head.
    bool holds(const uint8_t* mantissa) const;
};

} // namespace otaro
