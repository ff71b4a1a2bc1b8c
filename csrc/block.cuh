// What the kernels of both codecs share: where a block lies in its packet row, and decoding.
//
// One thread block serves one block of BLOCK_SIZE elements. A thread holds groups of four consecutive floats,
// THREADS groups apart, so that the threads of a warp read and write 512 consecutive bytes.

#include "numbers.cuh"
#include "packet.cuh"
#include "reduce.cuh"

constexpr int GROUPS = (BLOCK_SIZE / 4 + THREADS - 1) / THREADS;  // groups of four a thread

// Where this thread block's elements begin, and how many of them are not padding.
__device__ long long block_start() { return static_cast<long long>(blockIdx.x) * BLOCK_SIZE; }

__device__ int valid_elements(long long numel) {
    const long long left = numel - block_start();
    return left < 0 ? 0 : left < BLOCK_SIZE ? static_cast<int>(left) : BLOCK_SIZE;
}

// First element, within the block, of this thread's k-th group.
__device__ int group_at(int k) { return 4 * (static_cast<int>(threadIdx.x) + k * THREADS); }

// The row this block lies in, and the bytes at which its scale and codes begin there.
__device__ long long row_index(Layout layout) { return blockIdx.x / static_cast<unsigned>(layout.row_blocks); }

__device__ long long column_index(Layout layout) { return blockIdx.x % static_cast<unsigned>(layout.row_blocks); }

__device__ long long scale_offset(Layout layout) { return HEADER_BYTES + SCALE_BYTES * column_index(layout); }

template <int CODE_BITS>
__device__ long long codes_offset(Layout layout) {
    constexpr int BLOCK_BYTES = BLOCK_SIZE / 8 * CODE_BITS;
    return HEADER_BYTES + SCALE_BYTES * layout.row_blocks + column_index(layout) * BLOCK_BYTES;
}

__device__ float4 load_four(const float* values) { return *reinterpret_cast<const float4*>(values); }

__device__ float4 load_four(const BFloat16* values) {
    const Four<BFloat16> four = *reinterpret_cast<const Four<BFloat16>*>(values);
    return make_float4(widen(four.value[0]), widen(four.value[1]), widen(four.value[2]), widen(four.value[3]));
}

__device__ void store_four(float* output, float4 value) { *reinterpret_cast<float4*>(output) = value; }

__device__ void store_four(BFloat16* output, float4 value) {
    *reinterpret_cast<Four<BFloat16>*>(output) = {round_to_nearest(value.x), round_to_nearest(value.y),
                                                  round_to_nearest(value.z), round_to_nearest(value.w)};
}

// Four elements of payload + residual; 0 on the padding and beyond the block.
template <typename Residual>
__device__ float4 load_corrected(const float* payload, const Residual* residual, int at, int valid) {
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (at < valid) {
        value = load_four(payload + at);
        if (residual != nullptr) {
            const float4 lost = load_four(residual + at);
            value.x += lost.x;
            value.y += lost.y;
            value.z += lost.z;
            value.w += lost.w;
        }
        if (at + 1 >= valid) value.y = 0.0f;
        if (at + 2 >= valid) value.z = 0.0f;
        if (at + 3 >= valid) value.w = 0.0f;
    }
    return value;
}

// Store four elements inside the block, 0 on its padding.
template <typename Output>
__device__ void store_valid(Output* output, int at, int valid, float4 value) {
    if (at >= BLOCK_SIZE) return;
    if (at >= valid) value.x = 0.0f;
    if (at + 1 >= valid) value.y = 0.0f;
    if (at + 2 >= valid) value.z = 0.0f;
    if (at + 3 >= valid) value.w = 0.0f;
    store_four(output + at, value);
}

// Each run of row_blocks output blocks is the mean of the next `rows` packets, as Codec reads them: rows = 1 decodes.
template <typename Codec>
__device__ void decode_rows(const unsigned char* __restrict__ packets, float* __restrict__ output, Layout layout,
                            long long rows) {
    const int valid = valid_elements(layout.numel);
    const unsigned char* first = packets + row_index(layout) * rows * layout.row_bytes;
    const unsigned char* scales = first + scale_offset(layout);
    const unsigned char* codes = first + codes_offset<Codec::BITS>(layout);
    output += block_start();
#pragma unroll
    for (int k = 0; k < GROUPS; ++k) {
        const int at = group_at(k);
        if (at >= BLOCK_SIZE) break;
        float4 total = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);  // adding to -0 changes nothing
#pragma unroll 4
        for (long long row = 0; row < rows; ++row) {
            const float scale = *reinterpret_cast<const float*>(scales + row * layout.row_bytes);
            const float4 decoded = Codec::decode(codes + row * layout.row_bytes, at, scale);
            total = make_float4(total.x + decoded.x, total.y + decoded.y, total.z + decoded.z, total.w + decoded.w);
        }
        const float count = static_cast<float>(rows);
        store_valid(output, at, valid,
                    make_float4(total.x / count, total.y / count, total.z / count, total.w / count));
    }
}
