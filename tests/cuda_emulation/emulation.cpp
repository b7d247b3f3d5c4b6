// The CUDA kernels compiled for a CPU: see machine.h.

#include "machine.h"

#include "planes.cuh"

#include "matvec.cu"

#include "decode.cu"

template <int EXTRA, int COLUMNS> static void matvec_body(const void* call) {
    const Matvec& given = *(const Matvec*)call;
    if (given.gated)
        matvec<EXTRA, COLUMNS, true>(given);
    else
        matvec<EXTRA, COLUMNS>(given);
}
template <int COLUMNS> static void any_body(const void* call) { matvec_any<COLUMNS>(*(const Matvec*)call); }
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
const char* run_decode(const Decode* call, int grid, int threads, u32 seed) {
    return machine::run(decode_body, call, grid, 1, threads, 0, seed);
}
}
