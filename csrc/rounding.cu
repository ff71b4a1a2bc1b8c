// fp32 values put into weights, those of 16 bits rounded at random. Both may lie anywhere; element 0 is number 0.

#include "numbers.cuh"
#include "packet.cuh"

constexpr int QUADS = ELEMENTS_PER_THREAD / 4;

template <typename Weight>
__device__ void store_rounded(Weight* __restrict__ weights, const float* __restrict__ values, long long numel,
                              Keys keys) {
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {
        const long long at = 4 * ((static_cast<long long>(blockIdx.x) * QUADS + k) * THREADS + threadIdx.x);
        if (at >= numel) return;
        const int high = numel - at < 4 ? static_cast<int>(numel - at) : 4;
        const Four<float> four = load_part(values, at, 0, high);
        Four<Weight> rounded;
        const unsigned pair = static_cast<unsigned>(at / 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned both = random_pair(pair + i / 2, keys.first, keys.second);
            round_at_random(four.value[i], both >> 16 * (i % 2) & 0xffffu, rounded.value[i]);
        }
        store_part(weights, at, 0, high, rounded);
    }
}

#define KERNEL_FOR(NAME, TYPE)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) store_rounded_##NAME(                                     \
        TYPE* __restrict__ weights, const float* __restrict__ values, long long numel, Keys keys) {                 \
        store_rounded(weights, values, numel, keys);                                                                \
    }

KERNEL_FOR(float32, float)
KERNEL_FOR(bfloat16, BFloat16)
KERNEL_FOR(float16, Float16)
