// The runs of a bucket: parameters whose gradients or weights lie apart while the bucket's state is flat. Tables of them
// lie in memory, in the order of their elements, without gaps.

enum Kind { FLOAT32, BFLOAT16, FLOAT16, NOTHING };

// Stands for the type of what is not there.
struct Missing {};

template <typename Value>
[[maybe_unused]] constexpr bool IS_MISSING = false;

template <>
[[maybe_unused]] constexpr bool IS_MISSING<Missing> = true;

// The run of elements first to end, and where its gradient lies, of which kind. The factor of the momentum, that of the
// gradient, that of the difference to what it is added to, and what the gradient is divided by, with the inverse of
// that, 0 where it is not exact.
struct PayloadRun {
    long long first;
    long long end;
    long long gradient;
    int kind;
    float beta1;
    float gain;
    float weight;
    float divisor;
    float inverse;
};

// The run of elements first to end, where its weights lie and what is rounded from them, of which kind; whether the
// weights move, and by what.
struct MovedRun {
    long long first;
    long long end;
    long long weights;
    long long replica;
    int kind;
    int moves;
    float rate;
    float decay;
};

static_assert(sizeof(PayloadRun) == 48 && sizeof(MovedRun) == 48, "no gaps between members");

// The number of the run that an element belongs to, which must be one's: found by the whole thread block, once.
template <typename Run>
__device__ int find_run(const Run* runs, long long count, long long element) {
    __shared__ int found;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += THREADS)
        if (runs[i].first <= element && element < runs[i].end) found = i;
    __syncthreads();
    return found;
}

template <typename Value>
__device__ Value* at_address(long long address) {
    return reinterpret_cast<Value*>(address);
}
