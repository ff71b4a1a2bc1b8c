// A step of Adam over many tensors: the moments, what they divide by, and the weights; specified by kernels/adam.py.
// Tensors may lie anywhere, and what is written may be what was read.

#include "numbers.cuh"
#include "packet.cuh"
#include "runs.cuh"

constexpr int QUADS = ELEMENTS_PER_THREAD / 4;
constexpr long long BLOCK_ELEMENTS = static_cast<long long>(THREADS) * ELEMENTS_PER_THREAD;

// A tensor of `numel` elements, which thread blocks first to end are about. `output`: weights or denominators.
struct AdamRun {
    long long first;
    long long end;
    long long numel;
    long long gradient;
    long long momentum;
    long long variance;
    long long output;
};

// `weight`: of g - m in what is added to m, or to g without `from_momentum`. `rate`: its negative.
struct AdamFactors {
    float weight;
    float beta2;
    float square_gain;
    float correction;
    float eps;
    float decay;
    float rate;
    int from_momentum;
    int eps_inside_root;
    int holds_zero;
};

static_assert(sizeof(AdamRun) == 56 && sizeof(AdamFactors) == 40, "no gaps between members");

enum Tracked { NO_MOMENTS, VARIANCES, MOMENTS };
enum Output { NO_OUTPUT, DENOMINATORS, WEIGHTS };

__device__ float tracked_momentum(float gradient, float momentum, const AdamFactors& factors) {
    const float change = __fmul_rn(factors.weight, __fsub_rn(gradient, momentum));
    return __fadd_rn(factors.from_momentum != 0 ? momentum : gradient, change);
}

__device__ float tracked_variance(float gradient, float variance, const AdamFactors& factors) {
    const float square = __fmul_rn(__fmul_rn(factors.square_gain, gradient), gradient);
    return __fadd_rn(__fmul_rn(variance, factors.beta2), square);
}

__device__ float denominator(float variance, const AdamFactors& factors) {
    if (factors.holds_zero != 0 && variance == 0.0f) return __uint_as_float(INFINITY_BITS);
    if (factors.eps_inside_root != 0)
        return __fsqrt_rn(__fadd_rn(__fdiv_rn(variance, factors.correction), factors.eps));
    return __fadd_rn(__fdiv_rn(__fsqrt_rn(variance), factors.correction), factors.eps);
}

__device__ float moved(float weight, float momentum, float divisor, const AdamFactors& factors) {
    return __fadd_rn(__fmul_rn(weight, factors.decay), __fdiv_rn(__fmul_rn(factors.rate, momentum), divisor));
}

template <Tracked TRACKED, Output OUTPUT>
__device__ void adam_step(const AdamRun* __restrict__ runs, long long count, const AdamFactors& factors) {
    const AdamRun run = runs[find_run(runs, count, static_cast<long long>(blockIdx.x))];
    const float* gradients = at_address<float>(run.gradient);
    float* momenta = at_address<float>(run.momentum);
    float* variances = at_address<float>(run.variance);
    float* outputs = at_address<float>(run.output);
    const long long begin = (blockIdx.x - run.first) * BLOCK_ELEMENTS;
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {
        const long long at = begin + 4 * (static_cast<long long>(k) * THREADS + threadIdx.x);
        if (at >= run.numel) return;
        const int high = run.numel - at < 4 ? static_cast<int>(run.numel - at) : 4;
        Four<float> g, m, w;
        Four<float> v = load_part(variances, at, 0, high);
        if (TRACKED != NO_MOMENTS) g = load_part(gradients, at, 0, high);
        if (TRACKED == MOMENTS) m = load_part(momenta, at, 0, high);
        if (OUTPUT == WEIGHTS) w = load_part(outputs, at, 0, high);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (TRACKED == MOMENTS) m.value[i] = tracked_momentum(g.value[i], m.value[i], factors);
            if (TRACKED != NO_MOMENTS) v.value[i] = tracked_variance(g.value[i], v.value[i], factors);
            if (OUTPUT == DENOMINATORS) w.value[i] = denominator(v.value[i], factors);
            if (OUTPUT == WEIGHTS)
                w.value[i] = moved(w.value[i], m.value[i], denominator(v.value[i], factors), factors);
        }
        if (TRACKED == MOMENTS) store_part(momenta, at, 0, high, m);
        if (TRACKED != NO_MOMENTS) store_part(variances, at, 0, high, v);
        if (OUTPUT != NO_OUTPUT) store_part(outputs, at, 0, high, w);
    }
}

#define ADAM_STEP(NAME, TRACKED, OUTPUT)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                           \
        adam_##NAME(const AdamRun* __restrict__ runs, long long count, AdamFactors factors) {                       \
        adam_step<TRACKED, OUTPUT>(runs, count, factors);                                                           \
    }

ADAM_STEP(moments, MOMENTS, NO_OUTPUT)
ADAM_STEP(moments_denominators, MOMENTS, DENOMINATORS)
ADAM_STEP(moments_weights, MOMENTS, WEIGHTS)
ADAM_STEP(variances, VARIANCES, NO_OUTPUT)
ADAM_STEP(variances_denominators, VARIANCES, DENOMINATORS)
ADAM_STEP(denominators, NO_MOMENTS, DENOMINATORS)
