/* The engine's C ABI: matrices re-laid for multiplication, models made of them, sessions that hold texts, and the work
 * that runs many of them at a time.
 *
 * Handles are pointers to objects of the library. A model borrows its matrices, a session and a work their model: destroy
 * them in the reverse order of their making. Calls that only read an object may run at the same time; two calls on one
 * session or on one work, or a change of a matrix while it is run, may not. Error codes are those of otaro_core.h, and as
 * there every buffer's size is checked before it is touched.
 */
#ifndef OTARO_ENGINE_H
#define OTARO_ENGINE_H

#include "otaro_core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct otaro_arena otaro_arena;
typedef struct otaro_matrix otaro_matrix;
typedef struct otaro_model otaro_model;
typedef struct otaro_session otaro_session;
typedef struct otaro_work otaro_work;

/* ---- matrices --------------------------------------------------------------------------------------------------- */

/* Memory for planes that come and go together, such as those of one bit of all matrices: `bytes` of it in one piece, which
 * goes back to the system with the last of the planes in it, and not before the arena has been destroyed. Calls that use
 * an arena may not run at the same time. */
OTARO_API int32_t otaro_arena_create(int64_t bytes, otaro_arena** arena);
OTARO_API void otaro_arena_destroy(otaro_arena* arena);

/* Bytes of memory of all planes of a matrix that a width reads. */
OTARO_API int32_t otaro_matrix_size(const otaro_format* format, int64_t rows, int64_t columns, int32_t mantissa,
                                    int64_t* bytes);

/* `format` must be of the scheme OTARO_NESTED. */
OTARO_API int32_t otaro_matrix_create(const otaro_format* format, int64_t rows, int64_t columns, otaro_matrix** matrix);
OTARO_API void otaro_matrix_destroy(otaro_matrix* matrix);

/* Base and scales from `planes`, whose bit planes are not looked at. They lie in `arena` if it is not null and has room,
 * otherwise in memory of their own. */
OTARO_API int32_t otaro_matrix_set_base(otaro_matrix* matrix, const otaro_planes* planes, otaro_arena* arena,
                                        int32_t threads);

/* The plane of bit 4 ... 8 of each code; null takes it away and frees it. */
OTARO_API int32_t otaro_matrix_set_bit(otaro_matrix* matrix, int32_t bit, const uint8_t* data, int64_t bytes,
                                       otaro_arena* arena, int32_t threads);

/* Bytes of memory of the planes that are there. */
OTARO_API int32_t otaro_matrix_bytes(const otaro_matrix* matrix, int64_t* bytes);

/* y[b, n] = bias[n] + sum over k of x[b, k] * W[n, k]; x is rounded to 8 bits of the largest of 32, or to 16 if `fine`.
 * The result depends neither on `threads` nor on `isa` nor on how many rows x has. */
OTARO_API int32_t otaro_matrix_multiply(const otaro_matrix* matrix, int32_t mantissa, const float* x, int64_t x_bytes,
                                        int64_t batch, const float* bias, int64_t bias_bytes, float* y, int64_t y_bytes,
                                        int32_t fine, int32_t threads, int32_t isa);

/* ---- models ----------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t layers, hidden, intermediate, heads, kv_heads, head_dimension, vocabulary;
    float norm_epsilon;
    float rope_factor;           /* what cosine and sine are multiplied by */
    const float* rope_frequency; /* head_dimension / 2 of them */
    int64_t rope_frequency_bytes;
    const int64_t* window; /* positions a token sees, itself included, for each layer; 0: all before it */
    int64_t window_bytes;
} otaro_model_config;

enum otaro_matrix_role {
    OTARO_EMBEDDING = 0, /* of the whole model, as is the next: `layer` is then 0 */
    OTARO_HEAD = 1,
    OTARO_QUERY = 2,
    OTARO_KEY = 3,
    OTARO_VALUE = 4,
    OTARO_OUTPUT = 5,
    OTARO_GATE = 6,
    OTARO_UP = 7,
    OTARO_DOWN = 8,
    OTARO_MATRIX_ROLES = 9
};

enum otaro_vector_role {
    OTARO_FINAL_NORM = 0, /* of the whole model */
    OTARO_ATTENTION_NORM = 1,
    OTARO_FEED_FORWARD_NORM = 2,
    OTARO_QUERY_NORM = 3, /* this and those below may be left out */
    OTARO_KEY_NORM = 4,
    OTARO_QUERY_BIAS = 5,
    OTARO_KEY_BIAS = 6,
    OTARO_VALUE_BIAS = 7,
    OTARO_OUTPUT_BIAS = 8,
    OTARO_GATE_BIAS = 9,
    OTARO_UP_BIAS = 10,
    OTARO_DOWN_BIAS = 11,
    OTARO_VECTOR_ROLES = 12
};

OTARO_API int32_t otaro_model_create(const otaro_model_config* config, otaro_model** model);
OTARO_API void otaro_model_destroy(otaro_model* model);
/* All matrices of a model must have the same group size. */
OTARO_API int32_t otaro_model_set_matrix(otaro_model* model, int64_t layer, int32_t role, const otaro_matrix* matrix);
OTARO_API int32_t otaro_model_set_vector(otaro_model* model, int64_t layer, int32_t role, const float* data,
                                         int64_t bytes); /* copied */

/* ---- sessions --------------------------------------------------------------------------------------------------- */

/* A session holds the tokens of one text and their keys and values, up to `context` of them, as float16 where
 * `cache_mantissa` is 0, otherwise as SEFP codes of that width (OTARO_NESTED, groups of 64 along a head's dimensions). It
 * takes memory as the text grows, page by page. */
OTARO_API int32_t otaro_session_create(const otaro_model* model, int64_t context, int32_t cache_mantissa,
                                       otaro_session** session);
OTARO_API void otaro_session_destroy(otaro_session* session);
/* Bytes of memory that keys and values take now, and once the context is full. */
OTARO_API int32_t otaro_session_bytes(const otaro_session* session, int64_t* cache, int64_t* whole_cache);
/* Forgets the positions from `length` on and gives the memory of their keys and values back to the system. */
OTARO_API int32_t otaro_session_release(otaro_session* session, int64_t length);
/* Makes the text that of the first `length` positions of another session of the same model and `cache_mantissa`.
 * ERROR_INDEX: that is more than the other one holds, or than fits. */
OTARO_API int32_t otaro_session_copy(otaro_session* session, const otaro_session* other, int64_t length);

/* What a coded cache makes of keys or values: rows of `dimension` floats through codes of a width and back, to the same bits
 * with every `isa`. */
OTARO_API int32_t otaro_cache_round(int32_t mantissa, const float* x, int64_t x_bytes, int64_t rows, int64_t dimension,
                                    float* y, int64_t y_bytes, int32_t isa);

/* ---- running ---------------------------------------------------------------------------------------------------- */

/* How a token is picked from logits: the likeliest at temperature 0; above it a draw from the softmax of logits /
 * temperature, once all but the `top_k` likeliest (0: none), all beyond the fewest that together reach `top_p` and all below
 * `min_p` times the likeliest have been taken out, in this order; of equal ones the later go first. Before all of it the
 * logits of tokens that are in the text are divided by `repetition_penalty` (0.01 to 100) if they are above 0, and
 * multiplied if not. The random number depends on `seed` and on the position of the token that is picked, and on nothing
 * else. */
typedef struct {
    double temperature, top_p, min_p, repetition_penalty;
    int64_t top_k;
    uint64_t seed;
} otaro_sampling;

/* One text in a run: `count` tokens at positions `position` ... Their keys and values are kept; what lay at those
 * positions and behind is forgotten. `mantissa` holds the width of the embedding, of each layer, and of the head: layers + 2
 * bytes.
 *
 * Of the last `rows` tokens the logits are computed: written to `logits`, one row of the vocabulary's size each, if it is
 * not null, and with `sampling` not null a token is picked from each and written to `picked`. Picking ends with the first
 * that is not the token run after it, and what was run behind that is forgotten: so guesses are checked. `picked_count`
 * becomes the number of tokens picked.
 *
 * With `top` at least 0 `logprobs` receives for each of them its log-probability and those of the `top` likeliest tokens,
 * 1 + top floats, and `top_tokens` these `top` tokens, the likeliest first. They are those of the model: of the logits as
 * they are, at temperature 1. -1: none.
 *
 * Where `cancel` is not null and what it points to becomes other than 0 while the call runs, the text is left out from the
 * next layer on; `result` is then OTARO_CANCELLED and the positions being run are not there. `result` is otherwise OTARO_OK,
 * or OTARO_ERROR_NOT_FINITE where logits that a token is to be picked from are not finite. */
typedef struct {
    otaro_session* session;
    const int32_t* tokens;
    int64_t tokens_bytes, count, position;
    const uint8_t* mantissa;
    int64_t mantissa_bytes;
    int64_t rows;
    float* logits;
    int64_t logits_bytes;
    const otaro_sampling* sampling;
    int32_t* picked;
    int64_t picked_bytes, picked_count;
    int64_t top;
    float* logprobs;
    int64_t logprobs_bytes;
    int32_t* top_tokens;
    int64_t top_tokens_bytes;
    const int32_t* cancel;
    int32_t result;
} otaro_entry;

/* The memory to run a model with, whatever the number of texts. Every matrix and norm must have been set. */
OTARO_API int32_t otaro_work_create(const otaro_model* model, int32_t isa, otaro_work** work);
OTARO_API void otaro_work_destroy(otaro_work* work);
/* With `fine` not 0 every product takes its activations in 16 bits: slower, and nearer to exact arithmetic. */
OTARO_API int32_t otaro_work_set_fine(otaro_work* work, int32_t fine);
/* Bytes of memory that it takes now. It grows with the number of threads, the longest context and the rows that tokens are
 * picked from in one call. */
OTARO_API int32_t otaro_work_bytes(const otaro_work* work, int64_t* bytes);
/* Bytes of memory that a session takes once its context is full, and a work that runs it. The model needs no matrices yet;
 * `group_size` is theirs. */
OTARO_API int32_t otaro_size(const otaro_model* model, int32_t group_size, int64_t context, int32_t cache_mantissa,
                             int32_t threads, int64_t* cache, int64_t* work);

/* Runs several texts at once; tokens of one width share a reading of the weights. Each text is the same to the bit whatever
 * others run with it. What is wrong with one refuses the whole call, and nothing has changed then:
 * ERROR_INDEX: a token outside the vocabulary, or positions outside the context or with a gap before them.
 * ERROR_PLANES: a width whose planes are not there. ERROR_ARGUMENT: also a session that comes twice. */
OTARO_API int32_t otaro_run(otaro_work* work, otaro_entry* entries, int64_t entries_bytes, int64_t count,
                            int32_t threads);

/* Guesses how a text goes on after `token` at `position`: the likeliest token again and again, each run in its turn, up to
 * `*count` of them or until one is ahead of the next likeliest by less than `margin` (that one included). `*count` becomes
 * their number. Only the first `rows` of the vocabulary are looked at, and activations have 8 bits. Keys and values of the
 * guesses but the last are kept: run the text itself over them. Errors as for otaro_run. */
OTARO_API int32_t otaro_draft(otaro_work* work, otaro_session* session, int32_t token, int64_t position,
                              const uint8_t* mantissa, int64_t mantissa_bytes, int64_t rows, float margin,
                              int32_t* drafts, int64_t drafts_bytes, int64_t* count, int32_t threads);

/* Picks the token at `position` after `history_count` tokens from one row of logits; `top`, `logprobs` and `top_tokens` as in
 * otaro_entry. ERROR_NOT_FINITE: the logits are not. The result depends neither on `isa` nor on anything else. */
OTARO_API int32_t otaro_sample(const otaro_sampling* sampling, const float* logits, int64_t logits_bytes,
                               int64_t vocabulary, const int32_t* history, int64_t history_bytes, int64_t history_count,
                               uint64_t position, int32_t* token, int64_t top, float* logprobs, int64_t logprobs_bytes,
                               int32_t* top_tokens, int64_t top_tokens_bytes, int32_t isa);

/* ---- measuring -------------------------------------------------------------------------------------------------- */

/* Reads a buffer once from end to end, each thread a part of its own; `*sum` becomes the sum of its words. */
OTARO_API int32_t otaro_read(const uint64_t* data, int64_t bytes, uint64_t* sum, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
