/* The engine's C ABI: matrices re-laid for multiplication, models made of them, sessions that run a model.
 *
 * Handles are pointers to objects of the library. A model borrows its matrices and a session its model: destroy them in
 * the reverse order of their making. Calls that only read an object may run at the same time; two calls on one session, or
 * a change of a matrix while a session runs it, may not. Error codes are those of otaro_core.h, and as there every
 * buffer's size is checked before it is touched.
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

/* A session holds keys and values for up to `context` tokens, as float16 where `cache_mantissa` is 0, otherwise as SEFP
 * codes of that width (OTARO_NESTED, groups of 64 along a head's dimensions).
 * Every matrix and norm must have been set. */
OTARO_API int32_t otaro_session_create(const otaro_model* model, int64_t context, int32_t cache_mantissa, int32_t isa,
                                       otaro_session** session);
OTARO_API void otaro_session_destroy(otaro_session* session);
/* With `fine` not 0 every product takes its activations in 16 bits: slower, and nearer to exact arithmetic. */
OTARO_API int32_t otaro_session_set_fine(otaro_session* session, int32_t fine);
/* Bytes of memory that a session would take once the context is full: keys and values, and everything else. The model needs
 * no matrices yet; `group_size` is theirs. */
OTARO_API int32_t otaro_session_size(const otaro_model* model, int32_t group_size, int64_t context,
                                     int32_t cache_mantissa, int32_t threads, int64_t* cache, int64_t* work);
/* Bytes of memory that keys and values take now, once the context is full, and everything else a session has. They grow
 * with the text, page by page. */
OTARO_API int32_t otaro_session_bytes(const otaro_session* session, int64_t* cache, int64_t* whole_cache,
                                      int64_t* work);

/* Forgets the positions from `length` on and gives the memory of their keys and values back to the system. */
OTARO_API int32_t otaro_session_release(otaro_session* session, int64_t length);

/* What a coded cache makes of keys or values: rows of `dimension` floats through codes of a width and back, to the same bits
 * with every `isa`. */
OTARO_API int32_t otaro_cache_round(int32_t mantissa, const float* x, int64_t x_bytes, int64_t rows, int64_t dimension,
                                    float* y, int64_t y_bytes, int32_t isa);

/* Runs `count` tokens at positions `position` ... and keeps their keys and values; what lay at those positions and behind
 * is forgotten. `mantissa` holds the width of the embedding, of each layer, and of the head: layers + 2 bytes. The logits of
 * the last `logits_count` tokens are written, one row of the vocabulary's size each.
 * ERROR_INDEX: a token outside the vocabulary, or positions outside the context or with a gap before them.
 * ERROR_PLANES: a width whose planes are not there. */
OTARO_API int32_t otaro_session_run(otaro_session* session, const int32_t* tokens, int64_t tokens_bytes, int64_t count,
                                    int64_t position, const uint8_t* mantissa, int64_t mantissa_bytes, float* logits,
                                    int64_t logits_bytes, int64_t logits_count, int32_t threads);

/* Guesses how a text goes on after `token` at `position`: the likeliest token again and again, each run in its turn, up to
 * `*count` of them or until one is ahead of the next likeliest by less than `margin` (that one included). `*count` becomes
 * their number. Only the first `rows` of the vocabulary are looked at, and activations have 8 bits. Keys and values of the
 * guesses but the last are kept: run the text itself over them. Errors as for otaro_session_run. */
OTARO_API int32_t otaro_session_draft(otaro_session* session, int32_t token, int64_t position, const uint8_t* mantissa,
                                      int64_t mantissa_bytes, int64_t rows, float margin, int32_t* drafts,
                                      int64_t drafts_bytes, int64_t* count, int32_t threads);

/* ---- measuring -------------------------------------------------------------------------------------------------- */

/* Reads a buffer once from end to end, each thread a part of its own; `*sum` becomes the sum of its words. */
OTARO_API int32_t otaro_read(const uint64_t* data, int64_t bytes, uint64_t* sum, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
