// By what a change of a bucket's gradients is noticed: of every ELEMENTS of a bucket's elements the sum of their bits, as
// whole numbers modulo 2^32; specified by bucket_reference.py. Gradients may lie anywhere.

#include "packet.cuh"
#include "reduce.cuh"
#include "runs.cuh"

constexpr int ELEMENTS = 8192;

struct Total {
    __device__ static unsigned combine(unsigned left, unsigned right) { return left + right; }
};

// Of this thread's elements among `valid` ones.
template <typename Bits>
__device__ unsigned sum_of(const Bits* bits, int valid) {
    unsigned total = 0u;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < valid; i += THREADS) total += bits[i];
    return total;
}

__device__ unsigned bits_of(const PayloadRun& run, long long at) {
    if (run.kind == NOTHING) return 0u;
    if (run.kind == FLOAT32) return at_address<const unsigned>(run.gradient)[at];
    return at_address<const unsigned short>(run.gradient)[at];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    digest_gradients(const PayloadRun* __restrict__ runs, long long count, unsigned* __restrict__ digests,
                     long long numel) {
    const long long begin = static_cast<long long>(blockIdx.x) * ELEMENTS;
    const int valid = static_cast<int>(numel - begin < ELEMENTS ? numel - begin : ELEMENTS);
    runs += find_run(runs, count, begin);
    const PayloadRun run = *runs;
    unsigned total = 0u;
    if (begin + valid > run.end) {
        for (int i = static_cast<int>(threadIdx.x); i < valid; i += THREADS) {
            while (begin + i >= runs->end) ++runs;
            total += bits_of(*runs, begin + i - runs->first);
        }
    } else if (run.kind == FLOAT32) {
        total = sum_of(at_address<const unsigned>(run.gradient) + (begin - run.first), valid);
    } else if (run.kind != NOTHING) {
        total = sum_of(at_address<const unsigned short>(run.gradient) + (begin - run.first), valid);
    }
    total = reduce_block<Total>(total);
    if (threadIdx.x == 0) digests[blockIdx.x] = total;
}
