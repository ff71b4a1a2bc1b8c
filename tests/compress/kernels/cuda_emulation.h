// Just enough of CUDA to run the kernels of csrc/ on a CPU, one thread block after another.
//
// Every CUDA thread is a fiber: it runs until it waits at a barrier or a shuffle, and then the next one runs. The
// order of the fibers changes from round to round with a seed, so that a missing barrier shows up as a wrong result.

#pragma once

#include <ucontext.h>
#include <xmmintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)

struct Index {
    unsigned x, y;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned long long>(x) * y >> 32; }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
    unsigned chosen = 0;
    for (int i = 0; i < 4; ++i) chosen |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return chosen;
}
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned value) { return std::bit_cast<float>(value); }

static Index threadIdx, blockIdx;

namespace emulation {

constexpr int WARP_LANES = 32;
constexpr std::size_t STACK_BYTES = 64 * 1024;

struct Barrier {
    int members = 0;
    int waiting = 0;
    int generation = 0;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack = std::make_unique<char[]>(STACK_BYTES);
    bool finished = false;
};

using Kernel = void (*)(void**);  // takes where each of its arguments lies, as a GPU's driver does

static Kernel kernel;
static void** arguments;
static std::vector<Fiber> fibers;
static std::vector<Barrier> warp_barriers;
static std::vector<unsigned> exchanged;  // what each thread offers in a shuffle
static Barrier block_barrier;
static ucontext_t scheduler;
static bool progress;

inline void wait(Barrier& barrier) {
    const unsigned self = threadIdx.x;
    const int generation = barrier.generation;
    if (++barrier.waiting == barrier.members) {
        barrier.waiting = 0;
        ++barrier.generation;
        progress = true;
    }
    while (barrier.generation == generation) swapcontext(&fibers[self].context, &scheduler);
}

inline void run_fiber() {
    const unsigned self = threadIdx.x;
    kernel(arguments);
    fibers[self].finished = true;
    progress = true;
}

// Runs one thread block; false if all its threads wait for each other.
inline bool run_block(int threads, std::mt19937& random) {
    for (Fiber& fiber : fibers) {
        fiber.finished = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack = {.ss_sp = fiber.stack.get(), .ss_flags = 0, .ss_size = STACK_BYTES};
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, run_fiber, 0);
    }
    std::vector<unsigned> order(threads);
    for (int i = 0; i < threads; ++i) order[i] = i;
    for (bool running = true; running;) {
        running = false;
        progress = false;
        std::shuffle(order.begin(), order.end(), random);
        for (unsigned thread : order) {
            if (fibers[thread].finished) continue;
            threadIdx.x = thread;
            swapcontext(&scheduler, &fibers[thread].context);
            running = true;
        }
        if (running && !progress) return false;
    }
    return true;
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::block_barrier); }

template <typename Value>
Value __shfl_xor_sync(unsigned, Value value, int lane_mask) {
    static_assert(sizeof(Value) == sizeof(unsigned));
    const unsigned self = threadIdx.x;
    emulation::Barrier& warp = emulation::warp_barriers[self / emulation::WARP_LANES];
    emulation::exchanged[self] = std::bit_cast<unsigned>(value);
    emulation::wait(warp);
    const Value received = std::bit_cast<Value>(emulation::exchanged[self ^ lane_mask]);
    emulation::wait(warp);
    return received;
}

namespace emulation {

// For each kernel NAME a function emulated_NAME that takes pointers to its arguments, and one that tells their sizes.
template <typename... Parameters, std::size_t... Places>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<Places...>) {
    kernel(*static_cast<Parameters*>(arguments[Places])...);
}

template <typename... Parameters>
void call(void (*kernel)(Parameters...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<Parameters...>{});
}

template <typename... Parameters>
int sizes(void (*)(Parameters...), int* bytes) {
    ((*bytes++ = sizeof(Parameters)), ...);
    return sizeof...(Parameters);
}

#define EMULATE(NAME)                                                                          \
    extern "C" void emulated_##NAME(void** arguments) { emulation::call(NAME, arguments); }    \
    extern "C" int sizes_of_##NAME(int* bytes) { return emulation::sizes(NAME, bytes); }

}  // namespace emulation

// Subnormals are 0 while one of these lives, as inputs and as results: what -ftz=true makes of a kernel.
class Flushing {
  public:
    explicit Flushing(bool wanted) : before(_mm_getcsr()) {
        if (wanted) _mm_setcsr(before | 0x8040);
    }
    ~Flushing() { _mm_setcsr(before); }

  private:
    unsigned before;
};

// Launch of a kernel; 0 on success, 1 if its threads wait for each other for ever.
extern "C" int emulate(emulation::Kernel kernel, int columns, int rows, int threads, void** arguments, unsigned seed,
                       int flush) {
    using namespace emulation;
    const Flushing flushing(flush != 0);
    emulation::kernel = kernel;
    emulation::arguments = arguments;
    fibers = std::vector<Fiber>(threads);
    warp_barriers.assign(threads / WARP_LANES, {.members = WARP_LANES});
    exchanged.assign(threads, 0u);
    block_barrier = {.members = threads};
    std::mt19937 random(seed);
    for (int block = 0; block < columns * rows; ++block) {
        blockIdx = {static_cast<unsigned>(block % columns), static_cast<unsigned>(block / columns)};
        if (!run_block(threads, random)) return 1;
    }
    return 0;
}
