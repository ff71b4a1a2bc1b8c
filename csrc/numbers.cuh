// Floats of 16 bits, in bits so that no header of CUDA's is needed, groups of four, and random rounding.

[[maybe_unused]] constexpr float LARGEST_FLOAT = 3.402823466e38f;

struct BFloat16 {
    unsigned short bits;
};

struct Float16 {
    unsigned short bits;
};

// Four consecutive values: one load or store where they are aligned to their size.
template <typename Value>
struct alignas(4 * sizeof(Value)) Four {
    Value value[4];
};

template <typename Value>
__device__ bool is_aligned(const Value* address) {
    return reinterpret_cast<unsigned long long>(address) % sizeof(Four<Value>) == 0;
}

// Elements low to high of the four that begin at `values + at`; zeros elsewhere.
template <typename Value>
__device__ Four<Value> load_part(const Value* values, long long at, int low, int high) {
    if (low == 0 && high == 4 && is_aligned(values + at)) return *reinterpret_cast<const Four<Value>*>(values + at);
    Four<Value> part = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i >= low && i < high) part.value[i] = values[at + i];
    return part;
}

template <typename Value>
__device__ void store_part(Value* values, long long at, int low, int high, const Four<Value>& part) {
    if (low == 0 && high == 4 && is_aligned(values + at)) {
        *reinterpret_cast<Four<Value>*>(values + at) = part;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i >= low && i < high) values[at + i] = part.value[i];
}

__device__ float widen(float value) { return value; }

__device__ float widen(BFloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }

constexpr unsigned HALF_INFINITY = 0x7c00u;
constexpr unsigned HALF_SMALLEST_NORMAL = 0x0400u;  // 2^-14
constexpr unsigned REBIAS = 112u << 23;             // between the exponents of float and of Float16
constexpr float SUBNORMAL_UNIT = 5.9604644775390625e-8f;   // 2^-24
constexpr float SMALLEST_NORMAL = 6.103515625e-5f;         // 2^-14
constexpr unsigned SMALLEST_NORMAL_BITS = 113u << 23;
constexpr unsigned INFINITY_BITS = 0x7f800000u;

__device__ float widen(Float16 value) {
    const unsigned magnitude = value.bits & 0x7fffu;
    const unsigned sign = (value.bits & 0x8000u) << 16;
    unsigned wide = (magnitude << 13) + REBIAS;
    if (magnitude >= HALF_INFINITY) wide += REBIAS;
    if (magnitude < HALF_SMALLEST_NORMAL) wide = __float_as_uint(static_cast<float>(magnitude) * SUBNORMAL_UNIT);
    return __uint_as_float(wide | sign);
}

__device__ bool is_nan_bits(unsigned bits) { return (bits & 0x7fffffffu) > INFINITY_BITS; }

// One of the two neighbours of `value`, the nearer the likelier, by 16 random bits.
__device__ void round_at_random(float value, unsigned, float& rounded) { rounded = value; }

__device__ void round_at_random(float value, unsigned random, BFloat16& rounded) {
    const unsigned bits = __float_as_uint(value);
    rounded.bits = static_cast<unsigned short>((value != value ? 0x7fc00000u : bits + random) >> 16);
}

__device__ void round_at_random(float value, unsigned random, Float16& rounded) {
    const unsigned bits = __float_as_uint(value);
    const unsigned magnitude = bits & 0x7fffffffu;
    // Next to 2^-14, subnormal Float16 have the spacing that the normal ones there have: 13 bits more in float.
    const bool subnormal = magnitude < SMALLEST_NORMAL_BITS;
    const unsigned wide = subnormal ? __float_as_uint(fabsf(value) + SMALLEST_NORMAL) : magnitude;
    unsigned half = (wide + (random >> 3) - (subnormal ? SMALLEST_NORMAL_BITS : REBIAS)) >> 13;
    if (half > HALF_INFINITY) half = HALF_INFINITY;
    rounded.bits = static_cast<unsigned short>(value != value ? 0x7e00u : half | (bits >> 16 & 0x8000u));
}

// To the nearest, ties to even.
__device__ void round_to_nearest(float value, float& rounded) { rounded = value; }

__device__ void round_to_nearest(float value, BFloat16& rounded) {
    const unsigned bits = __float_as_uint(value);
    const unsigned nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    rounded.bits = static_cast<unsigned short>(is_nan_bits(bits) ? 0x7fc0u : nearest);
}

__device__ void round_to_nearest(float value, Float16& rounded) {
    const unsigned bits = __float_as_uint(value);
    const unsigned magnitude = bits & 0x7fffffffu;
    unsigned half = (magnitude - REBIAS + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    if (magnitude >= INFINITY_BITS || half > HALF_INFINITY) half = HALF_INFINITY;
    // Next to 1/2 floats have the spacing of subnormal Float16: the sum is what is rounded.
    if (magnitude < SMALLEST_NORMAL_BITS) half = __float_as_uint(fabsf(value) + 0.5f) - __float_as_uint(0.5f);
    if (is_nan_bits(bits)) half = 0x7e00u;
    rounded.bits = static_cast<unsigned short>(half | (bits >> 16 & 0x8000u));
}

// The two keys of a rounding's seed.
struct Keys {
    unsigned first;
    unsigned second;
};

static_assert(sizeof(Keys) == 8, "no gaps between members");

// 32 random bits for elements 2 * pair and 2 * pair + 1, a half each; specified by noise.py.
__device__ unsigned random_pair(unsigned pair, unsigned first_key, unsigned second_key) {
    unsigned bits = pair * 0x1e3779b9u ^ first_key;
    bits = (bits ^ bits >> 16) * 0x21f0aaadu ^ second_key;
    bits = (bits ^ bits >> 15) * 0x735a2d97u;
    return bits ^ bits >> 15;
}
