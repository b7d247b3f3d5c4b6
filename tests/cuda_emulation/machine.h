// A GPU on a CPU, for the tests: the functions of src/otaro/ops/cuda/machine.cuh in C++.
//
// Every thread of a cluster's blocks is a fiber; what must be done together (products, shuffles, barriers) waits until all
// have come. Fibers run in an order drawn from a seed. Copies to shared memory spoil their destination at once and
// bring the bytes only when nothing else can go on, so a missing wait shows. Every access is checked against the
// buffers that were declared, for place, alignment and what may be written; fibers that wait for ever are an error.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

#define KERNEL static void
#define DEVICE inline
#define UNROLL
#define NO_UNROLL
#define PARAMETER const

namespace machine {

struct Range {
    const u8* begin;
    size_t size;
    bool written;
};
struct Barrier {
    int arrivals, pending;
    long long bytes;
    u32 phase;
};
struct Copy {
    u8* to;
    const u8* from;
    u32 bytes;
    Barrier* barrier;
};
struct Slot {
    u32 a[4], b[2];
    float c[4];
};
struct Gathering {
    int arrived = 0;
    u32 generation = 0;
};
struct Warp : Gathering {
    Slot slots[2][32];
};
struct Block {
    std::vector<u8> memory;
    u8* shared;
    size_t size;
    std::vector<Warp> warps;
    Gathering barrier;
};
struct Fiber {
    ucontext_t context;
    int block, thread;
    bool done;
};

constexpr size_t STACK = 128 * 1024;
inline std::vector<Range> ranges;
inline std::vector<Block> blocks;
inline std::vector<Fiber> fibers;
inline std::map<const void*, Barrier> barriers;
inline std::vector<Copy> copies;
inline Gathering cluster_barrier;
inline ucontext_t scheduler;
inline Fiber* current;
inline int first_block, grid, threads;
inline long long progress;
inline std::string error;
inline void (*body)(const void*);
inline const void* argument;
inline u8* stacks;
inline size_t stack_count;

// The fiber that fails never goes on; the scheduler ends the run.
inline void yield() { swapcontext(&current->context, &scheduler); }
inline void fail(const std::string& message) {
    if (error.empty()) error = message;
    if (current)
        for (;;) yield();
}

inline void check_global(const void* at, size_t size, bool written) {
    const u8* place = (const u8*)at;
    if ((uintptr_t)at % std::min<size_t>(size, 16)) fail("a global access is not aligned");
    for (const Range& range : ranges)
        if (place >= range.begin && place + size <= range.begin + range.size && (range.written || !written)) return;
    fail(written ? "a store outside of the results" : "a load outside of the arguments");
}
inline void check_shared(const void* at, size_t size) {
    const Block& block = blocks[current->block];
    if ((uintptr_t)at % std::min<size_t>(size, 16)) fail("an access to shared memory is not aligned");
    if ((const u8*)at < block.shared || (const u8*)at + size > block.shared + block.size)
        fail("an access outside of shared memory");
}

inline void gather(Gathering& gathering, int count) {
    u32 generation = gathering.generation;
    if (++gathering.arrived == count) {
        gathering.arrived = 0;
        gathering.generation++;
        progress++;
        return;
    }
    while (gathering.generation == generation) yield();
}

inline float half(u16 bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                  : exponent == 0 ? std::ldexp((float)mantissa, -24)
                                  : std::ldexp((float)(1024 + mantissa), exponent - 25);
    return bits >> 15 ? -value : value;
}
inline u16 round_half(float value) {
    u16 sign = std::signbit(value) ? 0x8000 : 0;
    double size = std::fabs((double)value);
    if (std::isnan(value)) return 0x7FFF;
    if (size >= 65520) return sign | 0x7C00;
    int exponent = std::max(size > 0 ? std::ilogb(size) : -14, -14);
    double steps = std::nearbyint(std::ldexp(size, 10 - exponent));
    return sign | (u16)(((exponent + 14) << 10) + (int)steps);
}
inline u16 round_bfloat(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return 0x7FFF;
    return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline Warp& own_warp() { return blocks[current->block].warps[current->thread / 32]; }
inline const Slot* exchange(const Slot& own) {
    Warp& warp = own_warp();
    Slot* slots = warp.slots[warp.generation & 1];
    slots[current->thread % 32] = own;
    gather(warp, 32);
    return slots;
}

inline void start() {
    body(argument);
    current->done = true;
    progress++;
    for (;;) yield();
}

inline void complete(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase++, barrier.pending = barrier.arrivals;
    progress++;
}

// Brings one copy's bytes, the newest first if the seed says so.
inline void deliver(bool newest) {
    size_t index = newest ? copies.size() - 1 : 0;
    Copy copy = copies[index];
    copies.erase(copies.begin() + index);
    std::memcpy(copy.to, copy.from, copy.bytes);
    copy.barrier->bytes -= copy.bytes;
    complete(*copy.barrier);
}

inline void run_cluster(int cluster, int split, size_t shared_bytes, std::mt19937& random) {
    first_block = cluster * split;
    barriers.clear(), copies.clear();
    cluster_barrier = {};
    blocks.assign(split, {});
    for (Block& block : blocks) {
        block.memory.assign(shared_bytes + 128, 0xAB);
        block.shared = (u8*)(((uintptr_t)block.memory.data() + 127) & ~(uintptr_t)127);
        block.size = shared_bytes;
        block.warps.resize(threads / 32);
    }
    fibers = std::vector<Fiber>(split * threads);
    if (stack_count < fibers.size()) {
        if (stacks) munmap(stacks, stack_count * STACK);
        stack_count = fibers.size();
        stacks = (u8*)mmap(nullptr, stack_count * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    std::vector<int> order(fibers.size());
    for (size_t i = 0; i < fibers.size(); i++) {
        fibers[i].block = i / threads, fibers[i].thread = i % threads, fibers[i].done = false;
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack = {stacks + i * STACK, 0, STACK};
        makecontext(&fibers[i].context, start, 0);
        order[i] = i;
    }
    std::shuffle(order.begin(), order.end(), random);
    size_t left = fibers.size();
    while (left && error.empty()) {
        long long before = progress;
        left = 0;
        for (int index : order) {
            if (fibers[index].done) continue;
            current = &fibers[index];
            swapcontext(&scheduler, &current->context);
            current = nullptr;
            left += !fibers[index].done;
            if (!error.empty()) return;
        }
        if (left && progress == before) {
            if (copies.empty()) return fail("threads wait for what never comes");
            deliver(random() & 1);
        }
    }
    if (!copies.empty()) fail("a block ended before its copies");
}

inline const char* run(void (*kernel)(const void*), const void* call, int grid_blocks, int split, int block_threads,
                       size_t shared_bytes, u32 seed) {
    error.clear();
    body = kernel, argument = call, grid = grid_blocks, threads = block_threads, current = nullptr;
    std::mt19937 random(seed);
    for (int cluster = 0; cluster < grid / split && error.empty(); cluster++)
        run_cluster(cluster, split, shared_bytes, random);
    return error.c_str();
}

} // namespace machine

DEVICE u8* shared_memory() { return machine::blocks[machine::current->block].shared; }
DEVICE int thread_index() { return machine::current->thread; }
DEVICE int block_threads() { return machine::threads; }
DEVICE int block_index() { return machine::first_block + machine::current->block; }
DEVICE int grid_blocks() { return machine::grid; }

template <typename T> DEVICE T load_global(const T* from) {
    return machine::check_global(from, sizeof(T), false), *from;
}
template <typename T> DEVICE T load_fresh(const T* from) { return load_global(from); }
template <typename T> DEVICE void store_global(T* to, T value) {
    machine::check_global(to, sizeof(T), true), *to = value;
}
template <typename T> DEVICE T load_shared(const T* from) { return machine::check_shared(from, sizeof(T)), *from; }
template <typename T> DEVICE void store_shared(T* to, T value) { machine::check_shared(to, sizeof(T)), *to = value; }

DEVICE u32 rotate_right(u32 word, int count) { return (word >> (count & 31)) | (word << (-count & 31)); }
DEVICE u32 permute(u32 low, u32 high, u32 selector) {
    u64 bytes = (u64)high << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= (u32)(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
    return result;
}
DEVICE u32 and_or(u32 word, u32 mask, u32 other) { return (word & mask) | other; }
DEVICE u32 choose(u32 first, u32 mask, u32 second) { return (first & mask) | (second & ~mask); }

DEVICE float float_of_half(u32 bits) { return machine::half((u16)bits); }
DEVICE u32 halves_of_floats(float low, float high) {
    return machine::round_half(low) | (u32)machine::round_half(high) << 16;
}
DEVICE u32 bfloats_of_floats(float low, float high) {
    return machine::round_bfloat(low) | (u32)machine::round_bfloat(high) << 16;
}
DEVICE float float_of_bits(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
DEVICE u32 bits_of_float(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
DEVICE float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE float exponential(float value) { return std::exp(value); }
DEVICE float multiply(float a, float b) { return a * b; }

// Lane l gives of A rows l/4, l/4 + 8 and columns 2·(l%4) + {0, 1, 8, 9}, of B these as rows and column l/4.
DEVICE void multiply_tile(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
    machine::Slot own = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    const machine::Slot* slots = machine::exchange(own);
    int lane = thread_index() % 32;
    for (int j = 0; j < 4; j++) {
        double sum = own.c[j];
        for (int k = 0; k < 16; k++) {
            u32 weight = slots[lane / 4 * 4 + k % 8 / 2].a[j / 2 + k / 8 * 2];
            u32 activation = slots[(lane % 4 * 2 + j % 2) * 4 + k % 8 / 2].b[k / 8];
            sum += (double)machine::half(weight >> 16 * (k % 2)) * machine::half(activation >> 16 * (k % 2));
        }
        d[j] = (float)sum;
    }
}
DEVICE float shuffle(float value, int lane) { return machine::exchange({{}, {}, {value}})[lane].c[0]; }
DEVICE float shuffle_xor(float value, int mask) { return shuffle(value, (thread_index() % 32) ^ mask); }
DEVICE void synchronize_block() { machine::gather(machine::blocks[machine::current->block].barrier, machine::threads); }
DEVICE void synchronize_cluster() {
    machine::gather(machine::cluster_barrier, machine::threads * (int)machine::blocks.size());
}
DEVICE float load_cluster(const float* own, int rank) {
    machine::check_shared(own, sizeof(float));
    if (machine::fibers[rank * machine::threads].done) machine::fail("a block of the cluster has ended");
    return *(const float*)(machine::blocks[rank].shared + ((const u8*)own - shared_memory()));
}

DEVICE void barrier_init(u64* barrier, u32 arrivals) {
    machine::check_shared(barrier, sizeof(u64));
    machine::barriers[barrier] = {(int)arrivals, (int)arrivals, 0, 0};
}
DEVICE void barriers_ready() {}
DEVICE machine::Barrier& known_barrier(u64* barrier) {
    if (!machine::barriers.count(barrier)) machine::fail("a barrier was never made");
    return machine::barriers[barrier];
}
DEVICE void barrier_expect(u64* barrier, u32 bytes) {
    machine::Barrier& known = known_barrier(barrier);
    if (--known.pending < 0) machine::fail("a barrier has more arrivals than it awaits");
    known.bytes += bytes;
    machine::complete(known);
}
DEVICE void copy_to_shared(void* to, const void* from, u32 bytes, u64* barrier) {
    machine::check_global(from, 16, false);
    machine::check_global((const u8*)from + bytes - 16, 16, false);
    machine::check_shared(to, 16);
    machine::check_shared((u8*)to + bytes - 16, 16);
    if (bytes % 16) machine::fail("a copy is not of whole 16 bytes");
    std::memset(to, 0xAB, bytes);
    machine::copies.push_back({(u8*)to, (const u8*)from, bytes, &known_barrier(barrier)});
}
DEVICE void barrier_wait(u64* barrier, u32 phase) {
    while ((known_barrier(barrier).phase & 1) == phase) machine::yield();
    machine::progress++;
}
DEVICE void start_next_kernel() {}
DEVICE void await_previous_kernel() {}
