// How the weights of a whole bucket move whose momentum is kept as sign1 packets; specified by bucket_reference.py.

#include "numbers.cuh"
#include "packet.cuh"
#include "momentum.cuh"
#include "runs.cuh"

// Weights and codes of a range that ends with the last run at the latest.
template <typename Weight>
__device__ void move_packed(const MovedRun* __restrict__ runs, long long count, Weight* __restrict__ weights,
                            const unsigned char* __restrict__ packets, const unsigned char* __restrict__ codes,
                            Part part, Range range, Keys keys) {
    const long long begin = static_cast<long long>(range.octet + blockIdx.x * THREADS) * EACH;
    runs += find_run(runs, count, begin < range.first ? range.first : begin);
    const Octet octet = find_octet(range);
    if (octet.at >= part.numel) return;
    const Signs signs = load_signs(packets, octet, part, range);
    const int low = low_of(octet);
    const long long element = octet.at + range.first;
    while (element + low >= runs->end) ++runs;
    codes += octet.at;
    weights += octet.at;
    Step step = {runs->rate, runs->decay, keys.first, keys.second};
    if (range.aligned != 0u && is_whole(octet, part) && element + EACH <= runs->end) {
        if (runs->moves == 0 || move_whole(weights, codes, signs, octet.number, step)) return;
    }
    const int high = high_of(octet, part);
#pragma unroll 1
    for (int i = low; i < high; ++i) {
        while (element + i >= runs->end) ++runs;
        step.lr = runs->rate;
        step.decay = runs->decay;
        if (runs->moves != 0) move_one(weights[i], codes[i], signs, octet.number, i, step);
    }
}

#define MOVE_PACKED_OF(NAME, TYPE)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) move_packed_##NAME(                                       \
        const MovedRun* __restrict__ runs, long long count, TYPE* __restrict__ weights,                             \
        const unsigned char* __restrict__ packets, const unsigned char* __restrict__ codes, Part part,              \
        Range range, Keys keys) {                                                                                   \
        move_packed(runs, count, weights, packets, codes, part, range, keys);                                       \
    }

MOVE_PACKED_OF(float32, float)
MOVE_PACKED_OF(bfloat16, BFloat16)
MOVE_PACKED_OF(float16, Float16)
