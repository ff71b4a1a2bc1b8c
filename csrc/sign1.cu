// The sign1 codec: a bit an element, 1 where u >= 0, least significant first, and the mean of |u| a block.
// Pointers to floats must be 16-byte aligned, to BFloat16 8-byte, packets 4-byte.

#include "block.cuh"

__device__ unsigned sign_bits(float4 value, int at, int valid) {
    return (at < valid && value.x >= 0.0f ? 1u : 0u) | (at + 1 < valid && value.y >= 0.0f ? 2u : 0u) |
           (at + 2 < valid && value.z >= 0.0f ? 4u : 0u) | (at + 3 < valid && value.w >= 0.0f ? 8u : 0u);
}

// `scale`, or where bit 31 is 0 its negative.
__device__ float signed_scale(unsigned bits, float scale) {
    return __uint_as_float(__float_as_uint(scale) ^ (~bits & 0x80000000u));
}

// A thread's groups of four in a packet, every one at the same place of its word.
class Sign1 {
  public:
    static constexpr int BITS = 1;

    __device__ explicit Sign1(const unsigned char* codes)
        : words(codes + threadIdx.x / 8 * 4), shift(31u - threadIdx.x % 8 * 4) {}

    __device__ void advance(long long bytes) { words += bytes; }

    __device__ float4 decode(int k, float scale) const {
        const unsigned word = *reinterpret_cast<const unsigned*>(words + k * (THREADS / 2));
        return make_float4(signed_scale(word << shift, scale), signed_scale(word << (shift - 1), scale),
                           signed_scale(word << (shift - 2), scale), signed_scale(word << (shift - 3), scale));
    }

  private:
    const unsigned char* words;
    unsigned shift;  // of the first of four, up to the place of a float's sign
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
    unsigned char* codes = row + codes_offset<1>(layout);

    float4 corrected[KEPT ? GROUPS : 1];
    float magnitude = 0.0f;
#pragma unroll UNROLLED
    for (int k = 0; k < GROUPS; ++k) {
        const float4 value = corrected[KEPT ? k : 0] = load_corrected(payload, residual, group_at(k), valid);
        magnitude += (fabsf(value.x) + fabsf(value.y)) + (fabsf(value.z) + fabsf(value.w));
    }
    const float scale = reduce_block<Sum>(magnitude) / static_cast<float>(valid > 0 ? valid : 1);
    if (threadIdx.x == 0) *reinterpret_cast<float*>(row + scale_offset()) = scale;

#pragma unroll UNROLLED
    for (int k = 0; k < GROUPS; ++k) {
        const int at = group_at(k);
        const float4 value = KEPT ? corrected[k] : load_corrected(payload, residual, at, valid);
        const unsigned bits = sign_bits(value, at, valid);
        // Eight neighbouring threads hold 32 consecutive elements: one word.
        unsigned word = bits << at % 32;
        word |= __shfl_xor_sync(ALL_LANES, word, 1);
        word |= __shfl_xor_sync(ALL_LANES, word, 2);
        word |= __shfl_xor_sync(ALL_LANES, word, 4);
        if (at % 32 == 0 && at < BLOCK_SIZE) *reinterpret_cast<unsigned*>(codes + at / 8) = word;

        const float4 decoded = make_float4(signed_scale(bits << 31, scale), signed_scale(bits << 30, scale),
                                           signed_scale(bits << 29, scale), signed_scale(bits << 28, scale));
        store_valid(lost, at, valid,
                    make_float4(value.x - decoded.x, value.y - decoded.y, value.z - decoded.z, value.w - decoded.w));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    encode_sign1(float* payload, const float* __restrict__ residual, unsigned char* __restrict__ packets,
                 Layout layout) {
    encode(payload, residual, payload, packets, layout);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    encode_rounded_sign1(const float* __restrict__ payload, const BFloat16* residual, BFloat16* new_residual,
                         unsigned char* __restrict__ packets, Layout layout) {
    encode(payload, residual, new_residual, packets, layout);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_sign1(const unsigned char* __restrict__ packets, float* __restrict__ output, Layout layout) {
    decode_row<Sign1>(packets, output, layout);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_mean_sign1(const unsigned char* __restrict__ packets, float* __restrict__ output, Layout layout,
                     Rows rows) {
    decode_mean<Sign1>(packets, output, layout, rows);
}
