// Running texts: rows of activations of several sessions go through a model together.
//
// A row is one token of one text. Products take rows of any texts, and rows of one width share a reading of the weights: in
// every layer rows lie in the order of their widths there, so that those of a width are neighbours (a group). Positions, keys
// and values and attention are each text's own. Every row goes through the same operations in the same order whatever rows
// come with it, so a text is the same to the bit alone and in company.
#pragma once

#include <vector>

#include "engine_kernels.h"
#include "handles.h"
#include "memory.h"
#include "model.h"
#include "sampling.h"
#include "session.h"
#include "threads.h"

namespace otaro {

constexpr int64_t kMostRowsAtOnce = 128; // run at a time; more are split

class Work {
  public:
    Work(const Model& model, const EngineKernels& kernels);

    // What it would take to run sessions of a context; the model needs no matrices for that.
    static int64_t bytes(const Model& model, int group_size, int64_t context, int cache_mantissa, int threads);

    // Sizes, tokens and widths have been checked, what depends on the state of sessions and planes is checked here.
    int run(otaro_entry* entries, int64_t count, int threads);
    int draft(Session& session, int32_t token, int64_t position, const uint8_t* mantissa, int64_t rows, float margin,
              int32_t* drafts, int64_t* count, int threads);
    void set_fine(bool fine) { fine_ = fine; }
    int64_t bytes() const { return bytes_; }
    const Model& model() const { return model_; }

  private:
    struct Quantized { // room for all rows of activations
        Memory<int8_t> coarse, fine;
        Memory<int16_t> words;
        Memory<float> scale, offset;
    };
    struct Part {           // consecutive tokens of one text, run together
        otaro_entry* entry; // null: a draft
        Session* session;
        const int32_t* tokens;
        const uint8_t* mantissa;
        int64_t count, position;
        int64_t first, origin; // row now; row among the angles
        int64_t wanted;        // of its last rows logits are wanted
        int64_t answered;      // rows of the same text before these that logits were wanted of
        int64_t slot;          // among the logits that tokens are picked from
    };
    struct Group { // neighbouring rows of one width
        int mantissa;
        int64_t first, count;
        Activations x; // of the product at hand, beginning with the group's first row
    };

    struct Projection { // a matrix of a layer, and where its product goes
        int role, bias;
        float* y;
        int64_t stride;
        bool add;
    };

    Work(const Model& model, int group_size, const EngineKernels& kernels, bool counting);

    int check(const Session& session, const int32_t* tokens, int64_t count, int64_t position,
              const uint8_t* mantissa) const;
    bool fine(int role, int mantissa) const;
    void run_parts(Team& team);
    void arrange(size_t width);
    bool drop_cancelled();
    void embed(Team& team);
    void attention(Team& team, const Layer& layer, size_t index);
    void attend(Team& team, const Layer& layer, size_t index);
    void feed_forward(Team& team, const Layer& layer);
    void answer(Team& team);
    void head(Team& team, int mantissa, int64_t rows, float* logits, int64_t stride);
    void pick(const Part& part, Picker& picker);

    void quantize_for(const Matrix& matrix, int role);
    template <class Prepare> void quantize(Team& team, int64_t length, int64_t cost, const Prepare& prepare);
    void multiply(Team& team);
    void project(Team& team, const Layer& layer, std::initializer_list<Projection> projections);
    float* normed(int64_t row, const float* weight);
    Activations activations(const Matrix& matrix, bool fine, int mantissa, int64_t row, int64_t count) const;
    void reserve(int threads, int64_t scores, int64_t rows);
    template <class T> Memory<T> room(int64_t count, Bytes (*take)(int64_t bytes) = allocate_bytes);

    const Model& model_;
    const EngineKernels& kernels_;
    bool drafting_ = false, fine_ = false;
    bool counting_; // bytes, without taking them
    int64_t bytes_ = 0, scratch_bytes_ = 0, score_count_ = 0, logits_rows_ = 0;
    int64_t stride_; // of the logits that tokens are picked from
    std::vector<Part> parts_;
    std::vector<Group> groups_;
    std::vector<Product> products_;
    std::vector<Attention> jobs_;
    std::vector<int64_t> sources_; // rows of activations that logits are computed of
    int16_t part_of_[kMostRowsAtOnce], group_of_[kMostRowsAtOnce];
    int64_t rows_ = 0;
    Memory<float> x_, normed_, query_, key_, value_, attended_, gate_, up_, cosine_, sine_, logits_;
    Quantized quantized_;
    std::vector<Memory<uint8_t>> scratch_; // by worker: unpacked tiles
    std::vector<Memory<float>> scores_;    // by worker
    std::vector<Picker> pickers_;          // by worker
};

} // namespace otaro
