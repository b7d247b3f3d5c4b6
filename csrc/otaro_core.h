/* The native core's C ABI.
 *
 * All tensors are row-major and contiguous, `rows` x `columns` with leading dimensions flattened into rows. A row is cut
 * into groups of `group_size` consecutive weights, the last one possibly short. Wherever a tensor is stored in planes its
 * rows are padded to whole groups:
 *
 *     base      (padded columns / 2) bytes a row: the top 4 bits of each code, the earlier weight in the low half
 *     bits[i]   (padded columns / 8) bytes a row: bit i+4 of each code from the top, the earliest weight lowest
 *     scale     a byte a group: the upper half of the float16 that its steps are multiples of, 0 for a group of zeros
 *
 * Bytes that are no scales (zero with a sign, subnormal numbers, infinities, NaN; with OTARO_TRUNCATE and OTARO_NEAREST all
 * that are no powers of two) are refused wherever scales are read.
 *
 * Every buffer comes with its size in bytes, which is checked before anything is read or written. Every function returns
 * 0 or one of the error codes below and never throws. Calls may run at the same time from several threads, and the result
 * depends neither on `threads` nor, except for the last bits of otaro_linear, on `isa`.
 */
#ifndef OTARO_CORE_H
#define OTARO_CORE_H

#include <stdint.h>

#define OTARO_ABI_VERSION 8
#define OTARO_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum otaro_error {
    OTARO_OK = 0,
    OTARO_ERROR_ARGUMENT = 1,   /* an unknown setting, a negative size, a pointer that is null */
    OTARO_ERROR_BUFFER = 2,     /* a buffer smaller than the sizes ask for */
    OTARO_ERROR_NOT_FINITE = 3, /* a NaN or infinity among the weights */
    OTARO_ERROR_INDEX = 4,      /* a row number outside the tensor */
    OTARO_ERROR_ISA = 5,        /* instructions that this machine or this build does not have */
    OTARO_ERROR_PLANES = 6,     /* fewer bit planes than the width needs */
    OTARO_ERROR_INTERNAL = 7,   /* out of memory or the like */
    OTARO_ERROR_SCALE = 8,      /* a byte that is no scale of the format */
    OTARO_CANCELLED = 9         /* stopped before its end, as asked for */
};

enum otaro_dtype { OTARO_FLOAT32 = 0, OTARO_FLOAT16 = 1, OTARO_BFLOAT16 = 2 };
enum otaro_scheme { OTARO_TRUNCATE = 0, OTARO_NEAREST = 1, OTARO_NESTED = 2 };
enum otaro_isa { OTARO_AUTO = 0, OTARO_REFERENCE = 1, OTARO_AVX2 = 2, OTARO_AVX512 = 3, OTARO_NEON = 4 };

#define OTARO_BIT_PLANES 5
#define OTARO_WIDTHS 6

typedef struct {
    int32_t scheme;
    int32_t group_size;
} otaro_format;

typedef struct {
    uint8_t* base;
    int64_t base_bytes;
    uint8_t* bits[OTARO_BIT_PLANES];
    int64_t bits_bytes[OTARO_BIT_PLANES];
    int64_t bits_count; /* how many of `bits` there are */
    uint8_t* scale;
    int64_t scale_bytes;
} otaro_planes;

/* Codes at a width: int16 of the tensor's own shape (rows not padded), and a scale per group. */
typedef struct {
    int16_t* code;
    int64_t code_bytes;
    uint8_t* scale;
    int64_t scale_bytes;
} otaro_codes;

/* Weights that decide the bits of narrow widths within the cells that narrower ones chose, each of the tensor's own size
 * and dtype: weight[i] those down to `mantissa[i]`, in rising order. */
typedef struct {
    const void* weight[OTARO_WIDTHS];
    int64_t weight_bytes[OTARO_WIDTHS];
    int32_t mantissa[OTARO_WIDTHS];
    int32_t count; /* how many there are */
} otaro_tiers;

OTARO_API int32_t otaro_abi_version(void);
OTARO_API int32_t otaro_isa_supported(int32_t isa);
OTARO_API int32_t otaro_best_isa(void);

/* The scales that weights are encoded with. Where a weight is not finite that of its group is unspecified. */
OTARO_API int32_t otaro_scales(const otaro_format* format, int64_t rows, int64_t columns, const void* weight,
                               int64_t weight_bytes, int32_t dtype, uint8_t* scale, int64_t scale_bytes,
                               int32_t threads, int32_t isa);

/* Weights to codes at a width. `scale`, here and below, are scales to encode with; null: they are found from the weight.
 * `not_finite` receives the flat index of the first bad weight with ERROR_NOT_FINITE. */
OTARO_API int32_t otaro_encode(const otaro_format* format, int64_t rows, int64_t columns, const void* weight,
                               int64_t weight_bytes, int32_t dtype, int32_t mantissa, const uint8_t* scale,
                               int64_t scale_bytes, const otaro_codes* codes, int64_t* not_finite, int32_t threads,
                               int32_t isa);

/* Codes of a width to values. */
OTARO_API int32_t otaro_decode(const otaro_format* format, int64_t rows, int64_t columns, const otaro_codes* codes,
                               int32_t mantissa, void* value, int64_t value_bytes, int32_t dtype, int32_t threads,
                               int32_t isa);

/* `count` codes of width `from` to the narrower width `to`; `scheme` as in otaro_format. */
OTARO_API int32_t otaro_truncate(int32_t scheme, int64_t count, const int16_t* code, int64_t code_bytes, int32_t from,
                                 int32_t to, int16_t* result, int64_t result_bytes, int32_t threads, int32_t isa);

/* Weights to the planes of their E5M8 codes (the first `bits_count` bit planes). `clamped` receives two counts of groups:
 * those whose scale is not 0 and whose exponent lies below the least, and those whose exponent lies above the greatest. */
OTARO_API int32_t otaro_pack(const otaro_format* format, int64_t rows, int64_t columns, const void* weight,
                             int64_t weight_bytes, int32_t dtype, const uint8_t* scale, int64_t scale_bytes,
                             const otaro_planes* planes, int64_t* clamped, int64_t* not_finite, int32_t threads,
                             int32_t isa);

/* Planes to values at a width. */
OTARO_API int32_t otaro_dequantize(const otaro_format* format, int64_t rows, int64_t columns,
                                   const otaro_planes* planes, int32_t mantissa, void* value, int64_t value_bytes,
                                   int32_t dtype, int32_t threads, int32_t isa);

/* Weights to the values they have at a width, in the same dtype. Where a weight is not finite the values of its group
 * are unspecified. `tiers`, which may be null, are for the scheme "nested": scales are found from the weight. */
OTARO_API int32_t otaro_quantize(const otaro_format* format, int64_t rows, int64_t columns, const void* weight,
                                 int64_t weight_bytes, int32_t dtype, int32_t mantissa, const otaro_tiers* tiers,
                                 const uint8_t* scale, int64_t scale_bytes, void* value, int64_t value_bytes,
                                 int32_t threads, int32_t isa);

/* The rows numbered by `index` as values at a width, in the order asked for. */
OTARO_API int32_t otaro_rows(const otaro_format* format, int64_t rows, int64_t columns, const otaro_planes* planes,
                             int32_t mantissa, const int64_t* index, int64_t index_bytes, int64_t count, void* value,
                             int64_t value_bytes, int32_t dtype, int32_t threads, int32_t isa);

/* y[b, n] = bias[n] + sum over k of x[b, k] * W[n, k], all float32, W decoded at a width; `bias` may be null. */
OTARO_API int32_t otaro_linear(const otaro_format* format, int64_t rows, int64_t columns, const otaro_planes* planes,
                               int32_t mantissa, const float* x, int64_t x_bytes, int64_t batch, const float* bias,
                               int64_t bias_bytes, float* y, int64_t y_bytes, int32_t threads, int32_t isa);

#ifdef __cplusplus
}
#endif

#endif
