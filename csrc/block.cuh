// What the kernels of all codecs share: where a block lies in its packet row, encoding and decoding.
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
[[maybe_unused]] constexpr bool WHOLE_TURNS = EVEN && GROUPS % MEAN_GROUPS == 0;

// Thread blocks that a processor holds at once, so that a thread has 64 registers: left to itself the compiler takes
// fewer for the largest thread blocks, and spills.
[[maybe_unused]] constexpr int RESIDENT = THREADS < 64 ? 16 : 1024 / THREADS;

// Between these a quotient by up to 2^24, and its remainder, are normal floats.
constexpr float SAFE_SMALLEST = 7.88860905221011805e-31f;  // 2^-100
constexpr float SAFE_LARGEST = 1.26765060022822940e30f;    // 2^100

// Where this thread block's elements begin, and how many of them are not padding. The grid has a column for each block
// of a row, and a row for each row.
__device__ long long block_start(Part part) {
    return blockIdx.y * part.shard + part.first + static_cast<long long>(blockIdx.x) * BLOCK_SIZE;
}

__device__ int valid_elements(Part part) {
    const long long left = part.numel - block_start(part);
    return left < 0 ? 0 : left < BLOCK_SIZE ? static_cast<int>(left) : BLOCK_SIZE;
}

// First element, within the block, of this thread's k-th group.
__device__ int group_at(int k) { return 4 * (static_cast<int>(threadIdx.x) + k * THREADS); }

// The bytes at which this block's scales and codes begin in its row.
template <typename Codec>
__device__ long long scale_offset() {
    return HEADER_BYTES + SCALE_BYTES * Codec::SCALES * static_cast<long long>(blockIdx.x);
}

template <typename Codec>
__device__ long long codes_offset(Part part) {
    constexpr int BLOCK_BYTES = BLOCK_SIZE / 8 * Codec::BITS;
    return HEADER_BYTES + SCALE_BYTES * Codec::SCALES * part.row_blocks +
           static_cast<long long>(blockIdx.x) * BLOCK_BYTES;
}

// The scales of a block.
template <int COUNT>
struct Scales {
    float value[COUNT];
};

template <typename Codec>
__device__ Scales<Codec::SCALES> load_scales(const unsigned char* place) {
    return *reinterpret_cast<const Scales<Codec::SCALES>*>(place);
}

__device__ float4 load_four(const float* values) { return *reinterpret_cast<const float4*>(values); }

template <typename Half>
__device__ float4 load_four(const Half* values) {
    const Four<Half> four = *reinterpret_cast<const Four<Half>*>(values);
    return make_float4(widen(four.value[0]), widen(four.value[1]), widen(four.value[2]), widen(four.value[3]));
}

__device__ void store_four(float* output, float4 value) { *reinterpret_cast<float4*>(output) = value; }

template <typename Half>
__device__ void store_four(Half* output, float4 value) {
    Four<Half> four;
    round_to_nearest(value.x, four.value[0]);
    round_to_nearest(value.y, four.value[1]);
    round_to_nearest(value.z, four.value[2]);
    round_to_nearest(value.w, four.value[3]);
    *reinterpret_cast<Four<Half>*>(output) = four;
}

// Four consecutive values, wherever they lie.
template <typename Value>
__device__ float4 load_anywhere(const Value* values) {
    if (is_aligned(values)) return load_four(values);
    return make_float4(widen(values[0]), widen(values[1]), widen(values[2]), widen(values[3]));
}

template <typename Value>
__device__ void store_anywhere(Value* values, float4 four) {
    if (is_aligned(values)) {
        store_four(values, four);
        return;
    }
    round_to_nearest(four.x, values[0]);
    round_to_nearest(four.y, values[1]);
    round_to_nearest(four.z, values[2]);
    round_to_nearest(four.w, values[3]);
}

__device__ float4 add(float4 left, float4 right) {
    return make_float4(left.x + right.x, left.y + right.y, left.z + right.z, left.w + right.w);
}

// What of four elements of the block is not padding, and 0 elsewhere.
__device__ float4 keep_valid(float4 value, int at, int valid) {
    if (at >= valid) value.x = 0.0f;
    if (at + 1 >= valid) value.y = 0.0f;
    if (at + 2 >= valid) value.z = 0.0f;
    if (at + 3 >= valid) value.w = 0.0f;
    return value;
}

// What is encoded, group by group: payload + residual (which may be null), 0 on the padding and beyond the block. Both
// begin where the block does.
template <typename Residual>
class Corrected {
  public:
    __device__ Corrected(const float* payload, const Residual* residual, int valid)
        : payload(payload), residual(residual), valid(valid) {}

    __device__ float4 group(int k) const {
        const int at = group_at(k);
        if (at >= valid) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float4 value = load_four(payload + at);
        if (residual != nullptr) value = add(value, load_four(residual + at));
        return keep_valid(value, at, valid);
    }

    __device__ void all(float4 (&values)[GROUPS]) const {
#pragma unroll
        for (int k = 0; k < GROUPS; ++k) values[k] = group(k);
    }

  private:
    const float* payload;
    const Residual* residual;
    int valid;
};

// Store four elements inside the block, 0 on its padding.
template <typename Output>
__device__ void store_valid(Output* output, int at, int valid, float4 value) {
    if (at < BLOCK_SIZE) store_four(output + at, keep_valid(value, at, valid));
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
__device__ void decode_row(const unsigned char* __restrict__ packets, float* __restrict__ output, Part part) {
    const unsigned char* row = packets + blockIdx.y * part.row_bytes;
    const Scales<Codec::SCALES> scale = load_scales<Codec>(row + scale_offset<Codec>());
    const Codec codec(row + codes_offset<Codec>(part));
    const long long begin = block_start(part);
    if (EVEN && begin + BLOCK_SIZE <= part.numel) {
        float* own = output + begin + group_at(0);
#pragma unroll UNROLLED
        for (int k = 0; k < GROUPS; ++k) store_four(own + 4 * THREADS * k, codec.decode(k, scale));
        return;
    }
    const int valid = valid_elements(part);
#pragma unroll 1
    for (int k = 0; k < GROUPS; ++k)
        if (group_at(k) < BLOCK_SIZE) store_valid(output + begin, group_at(k), valid, codec.decode(k, scale));
}

// The mean of `packets`, which are of the same elements, in this thread's groups from `first` on.
template <typename Codec, int COUNT>
__device__ void average(const unsigned char* packets, Part part, Rows rows, int first, float4 (&mean)[COUNT]) {
    const unsigned char* scale_of_row = packets + scale_offset<Codec>();
    Codec codec(packets + codes_offset<Codec>(part));
#pragma unroll
    for (int k = 0; k < COUNT; ++k) mean[k] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);  // adding to -0 changes nothing
#pragma unroll 4
    for (int row = 0; row < rows.count; ++row) {
        const Scales<Codec::SCALES> scale = load_scales<Codec>(scale_of_row);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            if (!WHOLE_TURNS && group_at(first + k) >= BLOCK_SIZE) break;
            mean[k] = add(mean[k], codec.decode(first + k, scale));
        }
        scale_of_row += part.row_bytes;
        codec.advance(part.row_bytes);
    }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) mean[k] = divide(mean[k], rows);
}

// The mean of this block of all packets.
template <typename Codec>
__device__ void decode_mean(const unsigned char* __restrict__ packets, float* __restrict__ output, Part part,
                            Rows rows) {
    const long long begin = block_start(part);
    const bool whole = WHOLE_TURNS && begin + BLOCK_SIZE <= part.numel;
    output += begin;
    for (int first = 0; first < GROUPS; first += MEAN_GROUPS) {
        float4 mean[MEAN_GROUPS];
        average<Codec>(packets, part, rows, first, mean);
#pragma unroll
        for (int k = 0; k < MEAN_GROUPS; ++k) {
            const int at = group_at(first + k);
            if (whole)
                store_four(output + at, mean[k]);
            else
                store_valid(output, at, valid_elements(part), mean[k]);
        }
    }
}

// Encode what `source` makes of this block into the packets, and write what was lost to `lost`, which may be what the
// source reads.
template <typename Codec, typename Source, typename Lost>
__device__ void encode(Source& source, Lost* lost, unsigned char* packets, Part part) {
    const int valid = valid_elements(part);
    lost += block_start(part);
    unsigned char* row = packets + blockIdx.y * part.row_bytes;
    unsigned char* codes = row + codes_offset<Codec>(part);
    float* scales = reinterpret_cast<float*>(row + scale_offset<Codec>());
    typename Codec::Encoder encoder;

    float4 corrected[GROUPS];  // in registers, or where there are too many nowhere: they are made for every pass
    if constexpr (KEPT) source.all(corrected);
    if constexpr (Codec::Encoder::LOOKS_FIRST) {
#pragma unroll UNROLLED
        for (int k = 0; k < GROUPS; ++k) encoder.look(KEPT ? corrected[k] : source.group(k));
        encoder.decide(valid);
    }
#pragma unroll UNROLLED
    for (int k = 0; k < GROUPS; ++k) encoder.see(KEPT ? corrected[k] : source.group(k), group_at(k), valid);
    encoder.settle(scales, valid);
#pragma unroll UNROLLED
    for (int k = 0; k < GROUPS; ++k) {
        const int at = group_at(k);
        store_valid(lost, at, valid, encoder.put(KEPT ? corrected[k] : source.group(k), at, valid, codes));
    }
}
