// The int8 codec: a signed byte an element, u / scale to the nearest integer, and max |u| / 127 as the scale.
// Pointers to floats must be 16-byte aligned, to BFloat16 8-byte, packets 4-byte.

#include "block.cuh"

constexpr float LARGEST_LEVEL = 127.0f;
constexpr float LARGEST_FLOAT = 3.402823466e38f;

// Magnitudes order as integers do, with NaN above infinity: the largest is NaN if any is.
__device__ unsigned magnitude_bits(float value) { return __float_as_uint(fabsf(value)); }

__device__ float level(float value, float scale) {
    return fminf(fmaxf(rintf(value / scale), -LARGEST_LEVEL), LARGEST_LEVEL);
}

__device__ unsigned byte_of(float level, int position) {
    return static_cast<unsigned>(static_cast<unsigned char>(static_cast<signed char>(level))) << 8 * position;
}

__device__ float scaled(unsigned word, int position, float scale) {
    return static_cast<float>(static_cast<signed char>(word >> 8 * position)) * scale;
}

// A thread's groups of four in a packet.
class Int8 {
  public:
    static constexpr int BITS = 8;

    __device__ explicit Int8(const unsigned char* codes) : words(codes + threadIdx.x * 4) {}

    __device__ void advance(long long bytes) { words += bytes; }

    __device__ float4 decode(int k, float scale) const {
        const unsigned word = *reinterpret_cast<const unsigned*>(words + k * (THREADS * 4));
        return make_float4(scaled(word, 0, scale), scaled(word, 1, scale), scaled(word, 2, scale),
                           scaled(word, 3, scale));
    }

  private:
    const unsigned char* words;
};

// Encode payload + residual (residual may be null) into the packets and write what was lost to `lost`, which may be the
// payload or the residual.
template <typename Residual, typename Lost>
__device__ void encode(const float* payload, const Residual* residual, Lost* lost, unsigned char* __restrict__ packets,
                       Layout layout) {
    const int valid = valid_elements(layout);
    payload += block_start(layout);
    if (residual != nullptr) residual += block_start(layout);
    lost += block_start(layout);
    unsigned char* row = packets + blockIdx.y * layout.row_bytes;
    unsigned char* codes = row + codes_offset<8>(layout);

    float4 corrected[KEPT ? GROUPS : 1];
    unsigned largest = 0u;
#pragma unroll UNROLLED
    for (int k = 0; k < GROUPS; ++k) {
        const float4 value = corrected[KEPT ? k : 0] = load_corrected(payload, residual, group_at(k), valid);
        largest = Largest::combine(largest, magnitude_bits(value.x));
        largest = Largest::combine(largest, magnitude_bits(value.y));
        largest = Largest::combine(largest, magnitude_bits(value.z));
        largest = Largest::combine(largest, magnitude_bits(value.w));
    }
    const float scale = __uint_as_float(reduce_block<Largest>(largest)) / LARGEST_LEVEL;
    if (threadIdx.x == 0) *reinterpret_cast<float*>(row + scale_offset()) = scale;

    const bool usable = scale > 0.0f && scale <= LARGEST_FLOAT;
#pragma unroll UNROLLED
    for (int k = 0; k < GROUPS; ++k) {
        const int at = group_at(k);
        if (at >= BLOCK_SIZE) break;
        const float4 value = KEPT ? corrected[k] : load_corrected(payload, residual, at, valid);
        float4 levels = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (usable)
            levels = make_float4(level(value.x, scale), level(value.y, scale), level(value.z, scale),
                                 level(value.w, scale));
        *reinterpret_cast<unsigned*>(codes + at) =
            byte_of(levels.x, 0) | byte_of(levels.y, 1) | byte_of(levels.z, 2) | byte_of(levels.w, 3);
        store_valid(lost, at, valid,
                    make_float4(value.x - levels.x * scale, value.y - levels.y * scale,
                                value.z - levels.z * scale, value.w - levels.w * scale));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    encode_int8(float* payload, const float* __restrict__ residual, unsigned char* __restrict__ packets,
                 Layout layout) {
    encode(payload, residual, payload, packets, layout);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    encode_rounded_int8(const float* __restrict__ payload, const BFloat16* residual, BFloat16* new_residual,
                         unsigned char* __restrict__ packets, Layout layout) {
    encode(payload, residual, new_residual, packets, layout);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_int8(const unsigned char* __restrict__ packets, float* __restrict__ output, Layout layout) {
    decode_row<Int8>(packets, output, layout);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_mean_int8(const unsigned char* __restrict__ packets, float* __restrict__ output, Layout layout,
                     Rows rows) {
    decode_mean<Int8>(packets, output, layout, rows);
}
