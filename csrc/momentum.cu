// A momentum kept as sign1 packets, over a range of elements of its bucket: the next payload of leg 1 from it and a
// gradient, and the update of the weights.

#include "numbers.cuh"
#include "packet.cuh"
#include "momentum.cuh"

// Of the last momentum, of the gradient, and what the gradient is divided by, with the inverse of that, which is 0 where
// it is not exact.
struct Factors {
    float beta1;
    float gain;
    float loss_scale;
    float inverse;
};

static_assert(sizeof(Factors) == 16, "no gaps between members");

// All of eight elements, aligned to fours.
template <typename Value>
__device__ void load_whole(const Value* values, Value (&loaded)[EACH]) {
#pragma unroll
    for (int half = 0; half < EACH; half += 4) {
        const Four<Value> four = *reinterpret_cast<const Four<Value>*>(values + half);
#pragma unroll
        for (int i = 0; i < 4; ++i) loaded[half + i] = four.value[i];
    }
}

template <typename Value>
__device__ void store_whole(Value* values, const Value (&stored)[EACH]) {
#pragma unroll
    for (int half = 0; half < EACH; half += 4)
        *reinterpret_cast<Four<Value>*>(values + half) = {stored[half], stored[half + 1], stored[half + 2],
                                                         stored[half + 3]};
}

// Elements low to high of eight, wherever they lie; zeros elsewhere.
template <typename Value>
__device__ void load_some(const Value* values, int low, int high, Value (&loaded)[EACH]) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) loaded[i] = i >= low && i < high ? values[i] : Value{};
}

template <typename Value>
__device__ void store_some(Value* values, int low, int high, const Value (&stored)[EACH]) {
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (i >= low && i < high) values[i] = stored[i];
}

// gradient / loss_scale: by a product where that is exact, as it is with powers of two.
template <typename Gradient>
__device__ void unscale(const Gradient (&gradients)[EACH], Factors factors, float (&changes)[EACH]) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) changes[i] = widen(gradients[i]);
    if (factors.inverse != 0.0f) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) changes[i] *= factors.inverse;
        return;
    }
#pragma unroll 1
    for (int turn = 0; turn < EACH; ++turn) {  // a ring, so that registers need no index and the division stands once
        const float first = changes[0] / factors.loss_scale;
#pragma unroll
        for (int i = 0; i + 1 < EACH; ++i) changes[i] = changes[i + 1];
        changes[EACH - 1] = first;
    }
}

template <typename Gradient>
__device__ void make_payload(const Signs& signs, const Gradient (&gradients)[EACH], const unsigned char (&codes)[EACH],
                             const float* preconditioner, Factors factors, float (&payload)[EACH]) {
    float changes[EACH];
    unscale(gradients, factors, changes);
    const float kept = signs.scale * factors.beta1;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const float change = factors.gain * changes[i] * preconditioner[codes[i]];
        payload[i] = signed_magnitude(signs.bits, i, codes[i] != 0, kept) + change;
    }
}

template <typename Gradient>
__device__ void write_payload(const unsigned char* __restrict__ packets, const Gradient* __restrict__ gradient,
                              const unsigned char* __restrict__ codes, const float* __restrict__ table,
                              float* __restrict__ payload, Layout layout, Range range, Factors factors) {
    static_assert(THREADS == 256, "a thread for each entry of the table");
    // Entry 0 is a factor 0: a product where nothing moves, too, hands on what is not finite.
    __shared__ float preconditioner[THREADS];
    preconditioner[threadIdx.x] = threadIdx.x == 0 ? 0.0f : table[threadIdx.x];
    __syncthreads();
    const Octet octet = find_octet(range);
    if (octet.at >= layout.numel) return;
    const Signs signs = load_signs(packets, octet, layout, range);
    Gradient gradients[EACH] = {};
    unsigned char octet_codes[EACH];
    float result[EACH];
    codes += octet.at;
    payload += octet.at;
    if (range.aligned != 0u && is_whole(octet, layout)) {
        if (gradient != nullptr) load_whole(gradient + octet.at, gradients);
        load_whole(codes, octet_codes);
        make_payload(signs, gradients, octet_codes, preconditioner, factors, result);
        store_whole(payload, result);
        return;
    }
    const int low = low_of(octet);
    const int high = high_of(octet, layout);
    if (gradient != nullptr) load_some(gradient + octet.at, low, high, gradients);
    load_some(codes, low, high, octet_codes);
    make_payload(signs, gradients, octet_codes, preconditioner, factors, result);
    store_some(payload, low, high, result);
}

template <typename Weight>
__device__ void move_weights(Weight* __restrict__ weights, const unsigned char* __restrict__ packets,
                             const unsigned char* __restrict__ codes, Layout layout, Range range, Step step) {
    const Octet octet = find_octet(range);
    if (octet.at >= layout.numel) return;
    const Signs signs = load_signs(packets, octet, layout, range);
    codes += octet.at;
    weights += octet.at;
    if (range.aligned != 0u && is_whole(octet, layout) && move_whole(weights, codes, signs, octet.number, step)) return;
    const int high = high_of(octet, layout);
#pragma unroll 1
    for (int i = low_of(octet); i < high; ++i) move_one(weights[i], codes[i], signs, octet.number, i, step);
}

#define KERNELS_FOR(NAME, TYPE)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) momentum_payload_##NAME(                                  \
        const unsigned char* __restrict__ packets, const TYPE* __restrict__ gradient,                               \
        const unsigned char* __restrict__ codes, const float* __restrict__ table, float* __restrict__ payload,      \
        Layout layout, Range range, Factors factors) {                                                          \
        write_payload(packets, gradient, codes, table, payload, layout, range, factors);                            \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) apply_signs_##NAME(                                       \
        TYPE* __restrict__ weights, const unsigned char* __restrict__ packets,                                      \
        const unsigned char* __restrict__ codes, Layout layout, Range range, Step step) {                       \
        move_weights(weights, packets, codes, layout, range, step);                                                 \
    }

KERNELS_FOR(float32, float)
KERNELS_FOR(bfloat16, BFloat16)
KERNELS_FOR(float16, Float16)
