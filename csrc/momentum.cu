// A momentum kept as sign1 packets, over a range of elements of its bucket: the next payload of leg 1 from it and a
// gradient, and the update of the weights. Packets must be 4-byte aligned, everything else may lie anywhere.
//
// A layout's numel counts the elements of the range, which begins at number `first` of the bucket. A thread takes four
// elements whose numbers in the bucket begin at a multiple of four, ELEMENTS_PER_THREAD / 4 times; the first and the
// last four of a range may be fewer.

#include "numbers.cuh"
#include "packet.cuh"

constexpr int QUADS = ELEMENTS_PER_THREAD / 4;

// Of the last momentum, of the gradient, and what the gradient is divided by.
struct Factors {
    float beta1;
    float gain;
    float loss_scale;
};

// The size of the step, the factor of the weights, and the two keys of their rounding's seed.
struct Step {
    float lr;
    float decay;
    unsigned first_key;
    unsigned second_key;
};

static_assert(sizeof(Factors) == 12 && sizeof(Step) == 16, "no gaps between members");

// Four elements: where they begin, which of them belong to the range, their scale and their sign bits.
struct Quad {
    long long number;
    long long at;  // index within the range; may be -3 for the first, of which then only the end belongs to it
    int low;
    int high;
    float scale;
    unsigned bits;
};

__device__ Quad find_quad(const unsigned char* packets, int k, Layout layout, long long first) {
    Quad quad;
    const long long index = (static_cast<long long>(blockIdx.x) * QUADS + k) * THREADS + threadIdx.x;
    quad.number = (first / 4 + index) * 4;
    quad.at = quad.number - first;
    quad.low = quad.at < 0 ? static_cast<int>(-quad.at) : 0;
    quad.high = layout.numel - quad.at < 4 ? static_cast<int>(layout.numel - quad.at) : 4;
    if (quad.high <= quad.low) {
        quad.high = quad.low = 0;
        return quad;
    }
    const unsigned block = static_cast<unsigned>(quad.number / BLOCK_SIZE);
    const int place = static_cast<int>(quad.number % BLOCK_SIZE);
    const unsigned row_blocks = static_cast<unsigned>(layout.row_blocks);
    const unsigned column = block % row_blocks;
    const unsigned char* row = packets + block / row_blocks * layout.row_bytes + HEADER_BYTES;
    const long long codes_at = static_cast<long long>(column) * (BLOCK_SIZE / 8);
    const unsigned char* codes = row + SCALE_BYTES * layout.row_blocks + codes_at;
    quad.scale = *reinterpret_cast<const float*>(row + SCALE_BYTES * column);
    quad.bits = codes[place / 8] >> place % 8;
    return quad;
}

__device__ float signed_magnitude(const Quad& quad, int i, float magnitude) {
    return quad.bits >> i & 1u ? magnitude : -magnitude;
}

template <typename Gradient>
__device__ void write_payload(const unsigned char* __restrict__ packets, const Gradient* __restrict__ gradient,
                              const unsigned char* __restrict__ codes, const float* __restrict__ table,
                              float* __restrict__ payload, Layout layout, long long first, Factors factors) {
    Quad quads[QUADS];
    Four<Gradient> gradients[QUADS] = {};
    Four<unsigned char> four_codes[QUADS];
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {
        const Quad quad = quads[k] = find_quad(packets, k, layout, first);
        if (gradient != nullptr) gradients[k] = load_part(gradient, quad.at, quad.low, quad.high);
        four_codes[k] = load_part(codes, quad.at, quad.low, quad.high);
    }
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {
        const Quad& quad = quads[k];
        if (quad.high == 0) continue;
        const float kept = quad.scale * factors.beta1;
        Four<float> result;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned char code = four_codes[k].value[i];
            const float change = factors.gain * (widen(gradients[k].value[i]) / factors.loss_scale);
            // A product where nothing moves, too: it hands on what is not finite.
            result.value[i] = code ? signed_magnitude(quad, i, kept) + change * table[code] : 0.0f + change * 0.0f;
        }
        store_part(payload, quad.at, quad.low, quad.high, result);
    }
}

template <typename Weight>
__device__ void move_weights(Weight* __restrict__ weights, const unsigned char* __restrict__ packets,
                             const unsigned char* __restrict__ codes, Layout layout, long long first, Step step) {
    Quad quads[QUADS];
    Four<Weight> values[QUADS];
    Four<unsigned char> four_codes[QUADS];
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {
        const Quad quad = quads[k] = find_quad(packets, k, layout, first);
        values[k] = load_part(weights, quad.at, quad.low, quad.high);
        four_codes[k] = load_part(codes, quad.at, quad.low, quad.high);
    }
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {
        const Quad& quad = quads[k];
        if (quad.high == 0) continue;
        const float magnitude = quad.scale * step.lr;
        const unsigned pair = static_cast<unsigned>(quad.number / 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float moved = four_codes[k].value[i] ? signed_magnitude(quad, i, magnitude) : 0.0f;
            const float value = step.decay * widen(values[k].value[i]) - moved;
            const unsigned both = random_pair(pair + i / 2, step.first_key, step.second_key);
            const unsigned random = both >> 16 * (i % 2) & 0xffffu;
            round_at_random(value, random, values[k].value[i]);
        }
        store_part(weights, quad.at, quad.low, quad.high, values[k]);
    }
}

#define KERNELS_FOR(NAME, TYPE)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) momentum_payload_##NAME(                                  \
        const unsigned char* __restrict__ packets, const TYPE* __restrict__ gradient,                               \
        const unsigned char* __restrict__ codes, const float* __restrict__ table, float* __restrict__ payload,      \
        Layout layout, long long first, Factors factors) {                                                          \
        write_payload(packets, gradient, codes, table, payload, layout, first, factors);                            \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) apply_signs_##NAME(                                       \
        TYPE* __restrict__ weights, const unsigned char* __restrict__ packets,                                      \
        const unsigned char* __restrict__ codes, Layout layout, long long first, Step step) {                       \
        move_weights(weights, packets, codes, layout, first, step);                                                 \
    }

KERNELS_FOR(float32, float)
KERNELS_FOR(bfloat16, BFloat16)
KERNELS_FOR(float16, Float16)
