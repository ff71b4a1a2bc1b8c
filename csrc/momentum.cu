// A momentum kept as sign1 packets, over a range of elements of its bucket: the next payload of leg 1 from it and a
// gradient, and the update of the weights. Packets must be 4-byte aligned, everything else may lie anywhere.
//
// Factors come as the bits of floats. A thread takes four elements whose numbers in the bucket begin at a multiple of
// four, ELEMENTS_PER_THREAD / 4 times; the first and the last four of a range may be fewer.

#include "numbers.cuh"
#include "packet.cuh"

constexpr int QUADS = ELEMENTS_PER_THREAD / 4;

// Four elements: where they begin, which of them belong to the range, their scale and their sign bits.
struct Quad {
    long long number;
    long long at;  // index within the range; may be -3 for the first, of which then only the end belongs to it
    int low;
    int high;
    float scale;
    unsigned bits;
};

__device__ Quad find_quad(const unsigned char* packets, int k, long long numel, long long first, long long row_blocks,
                          long long row_bytes) {
    Quad quad;
    const long long index = (static_cast<long long>(blockIdx.x) * QUADS + k) * THREADS + threadIdx.x;
    quad.number = (first / 4 + index) * 4;
    quad.at = quad.number - first;
    quad.low = quad.at < 0 ? static_cast<int>(-quad.at) : 0;
    quad.high = numel - quad.at < 4 ? static_cast<int>(numel - quad.at) : 4;
    if (quad.high <= quad.low) {
        quad.high = quad.low = 0;
        return quad;
    }
    const unsigned block = static_cast<unsigned>(quad.number / BLOCK_SIZE);
    const int place = static_cast<int>(quad.number % BLOCK_SIZE);
    const unsigned column = block % static_cast<unsigned>(row_blocks);
    const unsigned char* row = packets + block / static_cast<unsigned>(row_blocks) * row_bytes + HEADER_BYTES;
    const unsigned char* codes = row + SCALE_BYTES * row_blocks + static_cast<long long>(column) * (BLOCK_SIZE / 8);
    quad.scale = *reinterpret_cast<const float*>(row + SCALE_BYTES * column);
    quad.bits = codes[place / 8] >> place % 8;
    return quad;
}

__device__ float factor(long long bits) { return __uint_as_float(static_cast<unsigned>(bits)); }

__device__ float signed_magnitude(const Quad& quad, int i, float magnitude) {
    return quad.bits >> i & 1u ? magnitude : -magnitude;
}

template <typename Gradient>
__device__ void write_payload(const unsigned char* __restrict__ packets, const Gradient* __restrict__ gradient,
                              const unsigned char* __restrict__ codes, const float* __restrict__ table,
                              float* __restrict__ payload, long long numel, long long first, long long row_blocks,
                              long long row_bytes, float beta1, float gain, float loss_scale) {
    Quad quads[QUADS];
    Four<Gradient> gradients[QUADS] = {};
    Four<unsigned char> four_codes[QUADS];
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {
        const Quad quad = quads[k] = find_quad(packets, k, numel, first, row_blocks, row_bytes);
        if (gradient != nullptr) gradients[k] = load_part(gradient, quad.at, quad.low, quad.high);
        four_codes[k] = load_part(codes, quad.at, quad.low, quad.high);
    }
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {
        const Quad& quad = quads[k];
        if (quad.high == 0) continue;
        const float kept = quad.scale * beta1;
        Four<float> result;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned char code = four_codes[k].value[i];
            const float change = gain * (widen(gradients[k].value[i]) / loss_scale);
            // A product where nothing moves, too: it hands on what is not finite.
            result.value[i] = code ? signed_magnitude(quad, i, kept) + change * table[code] : 0.0f + change * 0.0f;
        }
        store_part(payload, quad.at, quad.low, quad.high, result);
    }
}

template <typename Weight>
__device__ void move_weights(Weight* __restrict__ weights, const unsigned char* __restrict__ packets,
                             const unsigned char* __restrict__ codes, long long numel, long long first,
                             long long row_blocks, long long row_bytes, float lr, float decay, unsigned first_key,
                             unsigned second_key) {
    Quad quads[QUADS];
    Four<Weight> values[QUADS];
    Four<unsigned char> four_codes[QUADS];
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {
        const Quad quad = quads[k] = find_quad(packets, k, numel, first, row_blocks, row_bytes);
        values[k] = load_part(weights, quad.at, quad.low, quad.high);
        four_codes[k] = load_part(codes, quad.at, quad.low, quad.high);
    }
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {
        const Quad& quad = quads[k];
        if (quad.high == 0) continue;
        const float step = quad.scale * lr;
        const unsigned pair = static_cast<unsigned>(quad.number / 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float moved = four_codes[k].value[i] ? signed_magnitude(quad, i, step) : 0.0f;
            const float value = decay * widen(values[k].value[i]) - moved;
            const unsigned random = random_pair(pair + i / 2, first_key, second_key) >> 16 * (i % 2) & 0xffffu;
            round_at_random(value, random, values[k].value[i]);
        }
        store_part(weights, quad.at, quad.low, quad.high, values[k]);
    }
}

#define KERNELS_FOR(NAME, TYPE)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) momentum_payload_##NAME(                                  \
        const unsigned char* __restrict__ packets, const TYPE* __restrict__ gradient,                               \
        const unsigned char* __restrict__ codes, const float* __restrict__ table, float* __restrict__ payload,      \
        long long numel, long long first, long long row_blocks, long long row_bytes, long long beta1,               \
        long long gain, long long loss_scale) {                                                                     \
        write_payload(packets, gradient, codes, table, payload, numel, first, row_blocks, row_bytes, factor(beta1), \
                      factor(gain), factor(loss_scale));                                                            \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) apply_signs_##NAME(                                       \
        TYPE* __restrict__ weights, const unsigned char* __restrict__ packets,                                      \
        const unsigned char* __restrict__ codes, long long numel, long long first, long long row_blocks,            \
        long long row_bytes, long long lr, long long decay, long long first_key, long long second_key) {            \
        move_weights(weights, packets, codes, numel, first, row_blocks, row_bytes, factor(lr), factor(decay),       \
                     static_cast<unsigned>(first_key), static_cast<unsigned>(second_key));                          \
    }

KERNELS_FOR(float32, float)
KERNELS_FOR(bfloat16, BFloat16)
KERNELS_FOR(float16, Float16)
