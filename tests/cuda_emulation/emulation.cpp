// The CUDA kernels compiled for a CPU: see machine.h.

#include "machine.h"

#include "planes.cuh"

#include "units.cuh"

#include "matvec.cu"

#include "decode.cu"

#include "step.cu"

template <int EXTRA, int COLUMNS> static void matvec_body(const void* call) {
    const Matvec& given = *(const Matvec*)call;
    if (given.gated)
        matvec<EXTRA, COLUMNS, true>(given);
    else
        matvec<EXTRA, COLUMNS>(given);
}
template <int COLUMNS> static void any_body(const void* call) { matvec_any<COLUMNS>(*(const Matvec*)call); }
template <int EXTRA, int HEAD_EXTRA, int COLUMNS> static void step_body(const void* call) {
    Whole<EXTRA, HEAD_EXTRA, COLUMNS>{*(const Step*)call}.run();
}
static void decode_body(const void* call) { decode_kernel(*(const Decode*)call); }

#define WIDTHS(columns)                                                                                                \
    matvec_body<0, columns>, matvec_body<1, columns>, matvec_body<2, columns>, matvec_body<3, columns>,                \
        matvec_body<4, columns>, matvec_body<5, columns>, any_body<columns>

extern "C" {
void declare(const void* begin, size_t size, int written) {
    machine::ranges.push_back({(const u8*)begin, size, written != 0});
}
void forget() { machine::ranges.clear(); }
size_t matvec_size() { return sizeof(Matvec); }
size_t decode_size() { return sizeof(Decode); }

const char* run_matvec(const Matvec* call, int extra, int columns, int grid, int shared_bytes, u32 seed) {
    static void (*const bodies[3][7])(const void*) = {{WIDTHS(1)}, {WIDTHS(8)}, {WIDTHS(16)}};
    return machine::run(bodies[columns == 1   ? 0
                               : columns == 8 ? 1
                                              : 2][extra < 0 ? 6 : extra],
                        call, grid, call->split, call->warps * 32, shared_bytes, seed);
}
size_t step_size() { return sizeof(Step); }
// Few widths stand for all: what differs between them is the unit's product, which is tested by itself.
const char* run_step(const Step* call, int extra, int head_extra, int columns, int grid, int threads, int shared_bytes,
                     u32 seed) {
    void (*body)(const void*) = extra == 0 && columns == 1    ? step_body<0, 1, 1>
                                : extra == 0 && columns == 8  ? step_body<0, 1, 8>
                                : extra == 5 && columns == 1  ? step_body<5, 5, 1>
                                : extra == 5 && columns == 8  ? step_body<5, 5, 8>
                                : extra == 5 && columns == 16 ? step_body<5, 5, 16>
                                                              : nullptr;
    if (body == nullptr || head_extra != (extra == 0 ? 1 : extra)) return "these widths are not compiled";
    return machine::run(body, call, grid, grid, threads, shared_bytes, seed);
}
const char* run_decode(const Decode* call, int grid, int threads, u32 seed) {
    return machine::run(decode_body, call, grid, 1, threads, 0, seed);
}
}
