#include "model.h"

namespace otaro {

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

bool Model::holds(const uint8_t* mantissa) const {
    if (!whole.matrices[OTARO_EMBEDDING]->holds(mantissa[0])) return false;
    if (!whole.matrices[OTARO_HEAD]->holds(mantissa[layers.size() + 1])) return false;
    for (size_t i = 0; i < layers.size(); ++i) {
        for (int role = OTARO_QUERY; role <= OTARO_DOWN; ++role) {
            if (!layers[i].matrices[role]->holds(mantissa[i + 1])) return false;
        }
    }
    return true;
}

} // namespace otaro
