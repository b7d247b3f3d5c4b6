// The RMS norm of the residual stream, after the last product was added to it: a block for each row.
//
// A product of one row makes it itself (matvec.cu), from the same functions, and so to the same bits.

struct Norm {
    Stream stream;
    u16* out; // [rows, columns]
    int columns, bfloat;
};

KERNEL norm_kernel(PARAMETER Norm call) {
    float* squares = (float*)shared_memory();
    const int warp = thread_index() >> 5, lane = thread_index() & 31, warps = block_threads() / 32;
    const int columns = call.columns, units = (columns + 255) / 256;
    const long long row = block_index();
    float value[8], weight[8];
    load_norm(weight, call.stream, columns, warp);
    start_next_kernel();
    await_previous_kernel();
    for (int unit = warp; unit < units; unit += warps) {
        load_stream(value, call.stream, row, columns, unit);
        const float sum = unit_squares(value);
        if (lane == 0) store_shared(squares + unit, sum);
    }
    synchronize_block();
    const float factor = norm_factor(squares, units, call.stream);
    for (int unit = warp; unit < units; unit += warps) {
        if (units > warps) {
            load_stream(value, call.stream, row, columns, unit);
            load_norm(weight, call.stream, columns, unit);
        }
        if (call.stream.delta != nullptr) keep_stream(value, call.stream, row, columns, unit);
        u32 words[4];
        normed_words(words, value, factor, weight, call.bfloat);
        UNROLL
        for (int half = 0; half < 2; half++) {
            const int column = 256 * unit + 128 * half + 4 * lane;
            const uint2 stored = {words[2 * half], words[2 * half + 1]};
            if (column < columns) store_global((uint2*)(call.out + row * columns + column), stored);
        }
    }
}
