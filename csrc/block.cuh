// What all kernels share: where a block lies in its packet row, and reductions over a thread block.
//
// Compile-time constants, given with -D:
//   BLOCK_SIZE  elements a scale covers, a multiple of 64
//   THREADS     threads a thread block, a multiple of 32
// One thread block serves one block of BLOCK_SIZE elements. A thread holds groups of four consecutive floats,
// THREADS groups apart, so that the threads of a warp read and write 512 consecutive bytes.

constexpr int HEADER_BYTES = 16;
constexpr int SCALE_BYTES = 4;
constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;
constexpr int GROUPS = (BLOCK_SIZE / 4 + THREADS - 1) / THREADS;  // groups of four a thread
constexpr unsigned ALL_LANES = 0xffffffffu;

static_assert(BLOCK_SIZE % 64 == 0, "a block is a multiple of 64 elements");
static_assert(THREADS % WARP == 0 && THREADS <= 1024, "a thread block is at most 32 whole warps");

// Where this thread block's elements begin, and how many of them are not padding.
__device__ long long block_start() { return static_cast<long long>(blockIdx.x) * BLOCK_SIZE; }

__device__ int valid_elements(long long numel) {
    const long long left = numel - block_start();
    return left < 0 ? 0 : left < BLOCK_SIZE ? static_cast<int>(left) : BLOCK_SIZE;
}

// First element, within the block, of this thread's k-th group.
__device__ int group_at(int k) { return 4 * (static_cast<int>(threadIdx.x) + k * THREADS); }

// Rows of row_blocks blocks: the row this block lies in, and the bytes at which its scale and codes begin there.
__device__ long long row_index(long long row_blocks) { return blockIdx.x / static_cast<unsigned>(row_blocks); }

__device__ long long column_index(long long row_blocks) { return blockIdx.x % static_cast<unsigned>(row_blocks); }

__device__ long long scale_offset(long long row_blocks) {
    return HEADER_BYTES + SCALE_BYTES * column_index(row_blocks);
}

template <int CODE_BITS>
__device__ long long codes_offset(long long row_blocks) {
    constexpr int BLOCK_BYTES = BLOCK_SIZE / 8 * CODE_BITS;
    return HEADER_BYTES + SCALE_BYTES * row_blocks + column_index(row_blocks) * BLOCK_BYTES;
}

// Four elements of payload + residual; 0 on the padding and beyond the block.
__device__ float4 load_corrected(const float* payload, const float* residual, int at, int valid) {
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (at < valid) {
        value = *reinterpret_cast<const float4*>(payload + at);
        if (residual != nullptr) {
            const float4 lost = *reinterpret_cast<const float4*>(residual + at);
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
__device__ void store_valid(float* output, int at, int valid, float4 value) {
    if (at >= BLOCK_SIZE) return;
    if (at >= valid) value.x = 0.0f;
    if (at + 1 >= valid) value.y = 0.0f;
    if (at + 2 >= valid) value.z = 0.0f;
    if (at + 3 >= valid) value.w = 0.0f;
    *reinterpret_cast<float4*>(output + at) = value;
}

struct Sum {
    __device__ static float combine(float left, float right) { return left + right; }
};

struct Largest {
    __device__ static unsigned combine(unsigned left, unsigned right) { return left > right ? left : right; }
};

// Combination of one value a thread, the same on every thread, in an order that does not vary.
template <typename Operation, typename Value>
__device__ Value reduce_block(Value value) {
    __shared__ Value partial[WARP];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        value = Operation::combine(value, __shfl_xor_sync(ALL_LANES, value, offset));
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = lane < WARPS ? partial[lane] : Value(0);
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        value = Operation::combine(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
}
