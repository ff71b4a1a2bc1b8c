// The sign1 codec: a bit an element, 1 where u >= 0, least significant first, and the mean of |u| a block.
// Pointers to floats must be 16-byte aligned, to BFloat16 8-byte, packets 4-byte.

#include "block.cuh"

__device__ unsigned sign_bits(float4 value, int at, int valid) {
    return (at < valid && value.x >= 0.0f ? 1u : 0u) | (at + 1 < valid && value.y >= 0.0f ? 2u : 0u) |
           (at + 2 < valid && value.z >= 0.0f ? 4u : 0u) | (at + 3 < valid && value.w >= 0.0f ? 8u : 0u);
}

__device__ float4 signed_scale(unsigned bits, float scale) {
    return make_float4(bits & 1u ? scale : -scale, bits & 2u ? scale : -scale, bits & 4u ? scale : -scale,
                       bits & 8u ? scale : -scale);
}

struct Sign1 {
    static constexpr int BITS = 1;

    __device__ static float4 decode(const unsigned char* codes, int at, float scale) {
        return signed_scale(*reinterpret_cast<const unsigned*>(codes + at / 32 * 4) >> at % 32, scale);
    }
};

// Encode payload + residual (residual may be null) into the packets and write what was lost to `lost`, which may be the
// payload or the residual.
template <typename Residual, typename Lost>
__device__ void encode(const float* payload, const Residual* residual, Lost* lost, unsigned char* __restrict__ packets,
                       Layout layout) {
    const int valid = valid_elements(layout.numel);
    payload += block_start();
    if (residual != nullptr) residual += block_start();
    lost += block_start();
    unsigned char* row = packets + row_index(layout) * layout.row_bytes;
    unsigned char* codes = row + codes_offset<1>(layout);

    float4 corrected[GROUPS];
    float magnitude = 0.0f;
#pragma unroll
    for (int k = 0; k < GROUPS; ++k) {
        corrected[k] = load_corrected(payload, residual, group_at(k), valid);
        magnitude += (fabsf(corrected[k].x) + fabsf(corrected[k].y)) +
                     (fabsf(corrected[k].z) + fabsf(corrected[k].w));
    }
    const float scale = reduce_block<Sum>(magnitude) / static_cast<float>(valid > 0 ? valid : 1);
    if (threadIdx.x == 0) *reinterpret_cast<float*>(row + scale_offset(layout)) = scale;

#pragma unroll
    for (int k = 0; k < GROUPS; ++k) {
        const int at = group_at(k);
        const unsigned bits = sign_bits(corrected[k], at, valid);
        // Eight neighbouring threads hold 32 consecutive elements: one word.
        unsigned word = bits << at % 32;
        word |= __shfl_xor_sync(ALL_LANES, word, 1);
        word |= __shfl_xor_sync(ALL_LANES, word, 2);
        word |= __shfl_xor_sync(ALL_LANES, word, 4);
        if (at % 32 == 0 && at < BLOCK_SIZE) *reinterpret_cast<unsigned*>(codes + at / 8) = word;

        const float4 decoded = signed_scale(bits, scale);
        const float4 rest = make_float4(corrected[k].x - decoded.x, corrected[k].y - decoded.y,
                                        corrected[k].z - decoded.z, corrected[k].w - decoded.w);
        store_valid(lost, at, valid, rest);
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
    decode_sign1(const unsigned char* __restrict__ packets, float* __restrict__ output, Layout layout,
                 long long rows) {
    decode_rows<Sign1>(packets, output, layout, rows);
}
