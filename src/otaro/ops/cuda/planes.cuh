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
