// SEFP weights of the nested scheme in fragment order: where each weight's bits lie.
//
// A *unit* is 16 rows × 256 columns. Lane l of a warp holds of rows l/4 and l/4 + 8 of a unit the columns
//
//     64·g + 16·s + 4·(l%4) + 2·i + e        g = 0 … 3 the group, s = 0 … 3 the step, i = 0, 1 the pair, e = 0, 1
//
// which is 128 weights: 4 × 16 bytes of base (g), 16 bytes of each further plane, and 2 × 4 bytes of scale for a row
// pair. A code's four base bits lie in word s of the base at bit
//
//     6 - 4·i + 8·h + 16·e   (mod 32, h = 1 for the lower row)
//
// and its bit of a further plane in word g of the plane at bit 6 - 4·i + s + 8·h + 16·e.

constexpr int UNIT_BASE = 2048, UNIT_BITS = 512, UNIT_SCALE = 64; // bytes of a unit: 16 rows × 256 columns
constexpr int MOST_EXTRA = 5;

struct Planes {
    const u8 *base, *bits[MOST_EXTRA], *scale;
    int rows, columns, units; // units side by side: columns / 256, rounded up
};

DEVICE int smaller(int a, int b) { return a < b ? a : b; }
constexpr DEVICE float power_of_two(int exponent) { return exponent < 0 ? 1.0f / (1 << -exponent) : 1 << exponent; }
constexpr DEVICE float format_bias(int mantissa) { return 0.5f - 8.5f * (1 << (mantissa - 3)); }

// Which bit of a plane's word a pair's first field is at, and where a merged field of two bits begins.
constexpr DEVICE int single_place(int step, int pair) { return 6 - 4 * pair + step; }
constexpr DEVICE int double_place(int step, int pair) { return 6 - 4 * pair + (step & 2); }

// The residual stream and its RMS norm, of which a lane has two times four of a unit's 256 columns: 4·l and 4·l + 128
// from the unit's first on. The last product is added to the stream on the way. Sums are made unit by unit and then over
// all units in their order, here and wherever a product makes the norm itself.
struct Stream {
    const float* x;      // [rows, columns]
    const u16* delta;    // the last product, or none
    const float* weight; // the norm's
    float* sum;          // where the new stream is kept, unless there is no delta
    float epsilon, inverse; // `inverse` of the number of columns
    int bfloat;             // the type of delta
};

DEVICE float float_of_word(u32 word, int second, int bfloat) {
    return bfloat ? float_of_bits(second ? word & 0xFFFF0000u : word << 16)
                  : float_of_half(second ? word >> 16 : word & 0xFFFF);
}

DEVICE void load_stream(float (&value)[8], const Stream& stream, long long row, int columns, int unit) {
    UNROLL
    for (int half = 0; half < 2; half++) {
        const int column = 256 * unit + 128 * half + 4 * (thread_index() & 31);
        const float* from = stream.x + row * columns + column;
        float4 loaded = {0, 0, 0, 0};
        uint2 words = {0, 0};
        if (column < columns) {
            loaded = load_fresh((const float4*)from);
            if (stream.delta != nullptr) words = load_fresh((const uint2*)(stream.delta + row * columns + column));
        }
        value[4 * half] = loaded.x + float_of_word(words.x, 0, stream.bfloat);
        value[4 * half + 1] = loaded.y + float_of_word(words.x, 1, stream.bfloat);
        value[4 * half + 2] = loaded.z + float_of_word(words.y, 0, stream.bfloat);
        value[4 * half + 3] = loaded.w + float_of_word(words.y, 1, stream.bfloat);
    }
}
DEVICE void keep_stream(const float (&value)[8], const Stream& stream, long long row, int columns, int unit) {
    UNROLL
    for (int half = 0; half < 2; half++) {
        const int column = 256 * unit + 128 * half + 4 * (thread_index() & 31);
        const float4 kept = {value[4 * half], value[4 * half + 1], value[4 * half + 2], value[4 * half + 3]};
        if (column < columns) store_global((float4*)(stream.sum + row * columns + column), kept);
    }
}
DEVICE float unit_squares(const float (&value)[8]) {
    float sum = 0;
    UNROLL
    for (int j = 0; j < 8; j++) sum = fused_multiply_add(value[j], value[j], sum);
    UNROLL
    for (int mask = 16; mask >= 1; mask /= 2) sum += shuffle_xor(sum, mask);
    return sum;
}
// Of the squares of all units.
DEVICE float norm_factor(const float* squares, int units, const Stream& stream) {
    float sum = 0;
    for (int unit = 0; unit < units; unit++) sum += load_shared(squares + unit);
    return reciprocal_root(fused_multiply_add(sum, stream.inverse, stream.epsilon));
}
DEVICE void load_norm(float (&weight)[8], const Stream& stream, int columns, int unit) {
    UNROLL
    for (int half = 0; half < 2; half++) {
        const int column = 256 * unit + 128 * half + 4 * (thread_index() & 31);
        float4 own = {0, 0, 0, 0};
        if (column < columns) own = load_global((const float4*)(stream.weight + column));
        weight[4 * half] = own.x, weight[4 * half + 1] = own.y, weight[4 * half + 2] = own.z,
                      weight[4 * half + 3] = own.w;
    }
}
// Two words of half floats or bfloats for each four columns.
DEVICE void normed_words(u32 (&words)[4], const float (&value)[8], float factor, const float (&weight)[8], int bfloat) {
    UNROLL
    for (int j = 0; j < 4; j++) {
        const float low = multiply(multiply(value[2 * j], factor), weight[2 * j]);
        const float high = multiply(multiply(value[2 * j + 1], factor), weight[2 * j + 1]);
        words[j] = bfloat ? bfloats_of_floats(low, high) : halves_of_floats(low, high);
    }
}
