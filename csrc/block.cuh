// What the kernels of both codecs share: where a block lies in its packet row, and decoding.
//
// One thread block serves one block of BLOCK_SIZE elements. A thread holds groups of four consecutive floats,
// THREADS groups apart, so that the threads of a warp read and write 512 consecutive bytes.

#include "numbers.cuh"
#include "packet.cuh"
#include "reduce.cuh"

// How many packets are averaged, and the nearest float to the inverse of that, which is `exact` where it is that inverse.
struct Rows {
    int count;
    int exact;
    float inverse;
};

static_assert(sizeof(Rows) == 12, "no gaps between members");

constexpr int GROUPS = (BLOCK_SIZE / 4 + THREADS - 1) / THREADS;  // groups of four a thread
constexpr int MEAN_GROUPS = GROUPS < 4 ? GROUPS : 4;              // of which the sums are in registers at once
constexpr bool KEPT = GROUPS <= 8;                                // whether registers hold all groups of a thread
constexpr int UNROLLED = KEPT ? GROUPS : 1;
constexpr bool EVEN = BLOCK_SIZE % (4 * THREADS) == 0;            // no thread's last group lies beyond the block
constexpr bool WHOLE_TURNS = EVEN && GROUPS % MEAN_GROUPS == 0;

// Between these a quotient by up to 2^24, and its remainder, are normal floats.
constexpr float SAFE_SMALLEST = 7.88860905221011805e-31f;  // 2^-100
constexpr float SAFE_LARGEST = 1.26765060022822940e30f;    // 2^100

// Where this thread block's elements begin, and how many of them are not padding. The grid has a column for each block
// of a row, and a row for each row.
__device__ long long block_start(Layout layout) {
    return (blockIdx.y * layout.row_blocks + blockIdx.x) * BLOCK_SIZE;
}

__device__ int valid_elements(Layout layout) {
    const long long left = layout.numel - block_start(layout);
    return left < 0 ? 0 : left < BLOCK_SIZE ? static_cast<int>(left) : BLOCK_SIZE;
}

// First element, within the block, of this thread's k-th group.
__device__ int group_at(int k) { return 4 * (static_cast<int>(threadIdx.x) + k * THREADS); }

// The bytes at which this block's scale and codes begin in its row.
__device__ long long scale_offset() { return HEADER_BYTES + SCALE_BYTES * static_cast<long long>(blockIdx.x); }

template <int CODE_BITS>
__device__ long long codes_offset(Layout layout) {
    constexpr int BLOCK_BYTES = BLOCK_SIZE / 8 * CODE_BITS;
    return HEADER_BYTES + SCALE_BYTES * layout.row_blocks + static_cast<long long>(blockIdx.x) * BLOCK_BYTES;
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

// total / rows, to the nearest, from the nearest float to 1 / rows: their product, corrected by its remainder to within
// one place, and by that one's to the nearest (Markstein), where no remainder can fall below the normal floats.
__device__ float divide(float total, float rows, float inverse) {
    const float magnitude = fabsf(total);
    if (!(magnitude >= SAFE_SMALLEST && magnitude <= SAFE_LARGEST)) return total / rows;
    float quotient = total * inverse;
    quotient = __fmaf_rn(__fmaf_rn(-rows, quotient, total), inverse, quotient);
    return __fmaf_rn(__fmaf_rn(-rows, quotient, total), inverse, quotient);
}

__device__ float4 divide(float4 total, Rows rows) {
    if (rows.exact)
        return make_float4(total.x * rows.inverse, total.y * rows.inverse, total.z * rows.inverse,
                           total.w * rows.inverse);
    const float count = static_cast<float>(rows.count);
    return make_float4(divide(total.x, count, rows.inverse), divide(total.y, count, rows.inverse),
                       divide(total.z, count, rows.inverse), divide(total.w, count, rows.inverse));
}

// This block of one packet, as Codec reads it.
template <typename Codec>
__device__ void decode_row(const unsigned char* __restrict__ packets, float* __restrict__ output, Layout layout) {
    const unsigned char* row = packets + blockIdx.y * layout.row_bytes;
    const float scale = *reinterpret_cast<const float*>(row + scale_offset());
    const Codec codec(row + codes_offset<Codec::BITS>(layout));
    const long long begin = block_start(layout);
    if (EVEN && begin + BLOCK_SIZE <= layout.numel) {
        float* own = output + begin + group_at(0);
#pragma unroll UNROLLED
        for (int k = 0; k < GROUPS; ++k) store_four(own + 4 * THREADS * k, codec.decode(k, scale));
        return;
    }
    const int valid = valid_elements(layout);
#pragma unroll 1
    for (int k = 0; k < GROUPS; ++k)
        if (group_at(k) < BLOCK_SIZE) store_valid(output + begin, group_at(k), valid, codec.decode(k, scale));
}

// The mean of this block of all packets, which are of the same elements.
template <typename Codec>
__device__ void decode_mean(const unsigned char* __restrict__ packets, float* __restrict__ output, Layout layout,
                            Rows rows) {
    const long long begin = block_start(layout);
    const bool whole = WHOLE_TURNS && begin + BLOCK_SIZE <= layout.numel;
    output += begin;
    for (int first = 0; first < GROUPS; first += MEAN_GROUPS) {
        const unsigned char* scale_of_row = packets + scale_offset();
        Codec codec(packets + codes_offset<Codec::BITS>(layout));
        float4 total[MEAN_GROUPS];
#pragma unroll
        for (int k = 0; k < MEAN_GROUPS; ++k)
            total[k] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);  // adding to -0 changes nothing
#pragma unroll 4
        for (int row = 0; row < rows.count; ++row) {
            const float scale = *reinterpret_cast<const float*>(scale_of_row);
#pragma unroll
            for (int k = 0; k < MEAN_GROUPS; ++k) {
                if (!WHOLE_TURNS && group_at(first + k) >= BLOCK_SIZE) break;
                const float4 decoded = codec.decode(first + k, scale);
                total[k] = make_float4(total[k].x + decoded.x, total[k].y + decoded.y, total[k].z + decoded.z,
                                       total[k].w + decoded.w);
            }
            scale_of_row += layout.row_bytes;
            codec.advance(layout.row_bytes);
        }
#pragma unroll
        for (int k = 0; k < MEAN_GROUPS; ++k) {
            const int at = group_at(first + k);
            const float4 mean = divide(total[k], rows);
            if (whole)
                store_four(output + at, mean);
            else
                store_valid(output, at, valid_elements(layout), mean);
        }
    }
}
