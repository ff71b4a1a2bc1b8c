// Reductions over a thread block.

constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;
constexpr unsigned ALL_LANES = 0xffffffffu;

static_assert(THREADS % WARP == 0 && THREADS <= 1024, "a thread block is at most 32 whole warps");

struct Sum {
    __device__ static float combine(float left, float right) { return left + right; }
};

struct Largest {
    __device__ static unsigned combine(unsigned left, unsigned right) { return left > right ? left : right; }
};

struct Union {
    __device__ static unsigned combine(unsigned left, unsigned right) { return left | right; }
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
