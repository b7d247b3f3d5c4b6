// The instructions that the kernels use, one function each: PTX of compute capability 9.0 and later.
//
// No header of the CUDA toolkit is included: NVRTC compiles this where only torch is installed. The tests have a second
// version of this file for C++ on a CPU, where every thread of a block is a fiber and every access is checked.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL extern "C" __global__ void
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#define PARAMETER const __grid_constant__

DEVICE u8* shared_memory() {
    extern __shared__ __align__(128) u8 memory[];
    return memory;
}

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_threads() { return blockDim.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int grid_blocks() { return gridDim.x; }

template <typename T> DEVICE T load_global(const T* from) { return __ldg(from); }
template <typename T> DEVICE void store_global(T* to, T value) { *to = value; }
template <typename T> DEVICE T load_shared(const T* from) { return *from; }
template <typename T> DEVICE void store_shared(T* to, T value) { *to = value; }
// What another kernel may have written while this one was starting: never through the read-only cache.
template <typename T> DEVICE T load_fresh(const T* from) { return *(const volatile T*)from; }
DEVICE uint2 load_fresh(const uint2* from) {
    uint2 value;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from) : "memory");
    return value;
}

DEVICE u32 rotate_right(u32 word, int count) { return __funnelshift_r(word, word, count); }
DEVICE u32 permute(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }

// (word & mask) | other, and (first & mask) | (second & ~mask): one instruction, which the compiler would make two of
// where both mask and other are constants.
DEVICE u32 and_or(u32 word, u32 mask, u32 other) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "r"(mask), "r"(other));
    return result;
}
DEVICE u32 choose(u32 first, u32 mask, u32 second) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(result) : "r"(first), "r"(mask), "r"(second));
    return result;
}

DEVICE float float_of_half(u32 bits) {
    float value;
    asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "h"((u16)bits));
    return value;
}
DEVICE u32 halves_of_floats(float low, float high) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}
DEVICE u32 bfloats_of_floats(float low, float high) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}
DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of_float(float value) { return __float_as_uint(value); }
DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float exponential(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value * 1.4426950408889634f));
    return result;
}
// A product that is never fused with a sum.
DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }

// d = a · b + c: a is 16 × 16 and b 16 × 8 in half floats, c and d 16 × 8 in floats.
DEVICE void multiply_tile(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

DEVICE float shuffle(float value, int lane) { return __shfl_sync(0xFFFFFFFFu, value, lane); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, mask); }
DEVICE void synchronize_block() { __syncthreads(); }

// All blocks of a cluster, their shared memory seen by all.
DEVICE void synchronize_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
DEVICE float load_cluster(const float* own, int rank) {
    u32 address;
    float value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

// A barrier in shared memory that counts the bytes of copies, and copies of whole blocks of bytes that report to it.
DEVICE void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
DEVICE void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
DEVICE void copy_to_shared(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
DEVICE bool barrier_passed(u64* barrier, u32 phase) {
    u32 done;
    asm volatile("{ .reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(phase)
                 : "memory");
    return done != 0;
}
DEVICE u64 nanoseconds() {
    u64 time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}
// Waits for the end of a phase. A copy that does not come ends the kernel with an error after four seconds, not never.
DEVICE void barrier_wait(u64* barrier, u32 phase) {
    if (barrier_passed(barrier, phase)) return;
    u64 start = nanoseconds();
    while (!barrier_passed(barrier, phase))
        if (nanoseconds() - start > 4000000000ull) asm volatile("trap;");
}

// Where the launch allows it, the next kernel may start its own preparations, and this one awaits its predecessor.
DEVICE void start_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void await_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
