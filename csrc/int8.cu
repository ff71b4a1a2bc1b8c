// The int8 codec: a signed byte an element, u / scale to the nearest integer, and max |u| / 127 as the scale.
// Pointers to floats must be 16-byte aligned, packets 4-byte aligned.

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

// Encode payload + residual (residual may be null) into the packets and leave what was lost in payload.
extern "C" __global__ void __launch_bounds__(THREADS)
    encode_int8(float* __restrict__ payload, const float* __restrict__ residual, unsigned char* __restrict__ packets, long long numel,
                long long row_blocks, long long row_bytes) {
    const int valid = valid_elements(numel);
    payload += block_start();
    if (residual != nullptr) residual += block_start();
    unsigned char* row = packets + row_index(row_blocks) * row_bytes;
    unsigned char* codes = row + codes_offset<8>(row_blocks);

    float4 corrected[GROUPS];
    unsigned largest = 0u;
#pragma unroll
    for (int k = 0; k < GROUPS; ++k) {
        corrected[k] = load_corrected(payload, residual, group_at(k), valid);
        largest = Largest::combine(largest, magnitude_bits(corrected[k].x));
        largest = Largest::combine(largest, magnitude_bits(corrected[k].y));
        largest = Largest::combine(largest, magnitude_bits(corrected[k].z));
        largest = Largest::combine(largest, magnitude_bits(corrected[k].w));
    }
    const float scale = __uint_as_float(reduce_block<Largest>(largest)) / LARGEST_LEVEL;
    if (threadIdx.x == 0) *reinterpret_cast<float*>(row + scale_offset(row_blocks)) = scale;

    const bool usable = scale > 0.0f && scale <= LARGEST_FLOAT;
#pragma unroll
    for (int k = 0; k < GROUPS; ++k) {
        const int at = group_at(k);
        if (at >= BLOCK_SIZE) break;
        const float4 value = corrected[k];
        float4 levels = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (usable)
            levels = make_float4(level(value.x, scale), level(value.y, scale), level(value.z, scale),
                                 level(value.w, scale));
        *reinterpret_cast<unsigned*>(codes + at) =
            byte_of(levels.x, 0) | byte_of(levels.y, 1) | byte_of(levels.z, 2) | byte_of(levels.w, 3);
        store_valid(payload, at, valid,
                    make_float4(value.x - levels.x * scale, value.y - levels.y * scale,
                                value.z - levels.z * scale, value.w - levels.w * scale));
    }
}

// Each run of row_blocks output blocks is the mean of the next `rows` packets: rows = 1 decodes.
extern "C" __global__ void __launch_bounds__(THREADS)
    decode_int8(const unsigned char* __restrict__ packets, float* __restrict__ output, long long numel, long long row_blocks,
                long long row_bytes, long long rows) {
    const int valid = valid_elements(numel);
    const unsigned char* first = packets + row_index(row_blocks) * rows * row_bytes;
    const unsigned char* scales = first + scale_offset(row_blocks);
    const unsigned char* codes = first + codes_offset<8>(row_blocks);
    output += block_start();
#pragma unroll
    for (int k = 0; k < GROUPS; ++k) {
        const int at = group_at(k);
        if (at >= BLOCK_SIZE) break;
        float4 total = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);  // adding to -0 changes nothing
#pragma unroll 4
        for (long long row = 0; row < rows; ++row) {
            const float scale = *reinterpret_cast<const float*>(scales + row * row_bytes);
            const unsigned word = *reinterpret_cast<const unsigned*>(codes + row * row_bytes + at);
            total = make_float4(total.x + scaled(word, 0, scale), total.y + scaled(word, 1, scale),
                                total.z + scaled(word, 2, scale), total.w + scaled(word, 3, scale));
        }
        const float count = static_cast<float>(rows);
        store_valid(output, at, valid,
                    make_float4(total.x / count, total.y / count, total.z / count, total.w / count));
    }
}
