// The stat2 codec: a bit an element for its sign, as sign1 has it, and another that is 1 where |u| is at 0.98 root mean
// squares of the block or above; the scales are the mean |u| below that, 0 where there is none, and the mean of the rest.
//
// All backends split alike: sums are taken in one order, 64 side by side, of every 64th element, and then by halves.

constexpr double SPLIT = 0.98;
constexpr int SUMS = 64;
constexpr int SUMS_EACH = THREADS < SUMS ? SUMS / THREADS : 1;  // of a thread among the first
constexpr int TURN = 4 * THREADS;                               // elements of all threads' groups

struct Count {
    __device__ static unsigned combine(unsigned left, unsigned right) { return left + right; }
};

// The sum over the block of what the first threads hold of 64 sums, the same on every thread.
template <typename Value>
__device__ Value add_halves(const Value (&sums)[SUMS_EACH]) {
    __shared__ Value all[SUMS];
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < SUMS_EACH; ++i)
        if (thread + i * THREADS < SUMS) all[thread + i * THREADS] = sums[i];
    for (int half = SUMS / 2; half > 0; half /= 2) {
        __syncthreads();
        for (int i = thread; i < half; i += THREADS) all[i] = all[i] + all[i + half];
    }
    __syncthreads();
    return all[0];
}

// The elements of a turn of all threads' groups, in order.
__device__ const float* turn_of(float4 value) {
    __shared__ float4 turn[THREADS];
    __syncthreads();  // those of the last turn were read
    turn[threadIdx.x] = value;
    __syncthreads();
    return reinterpret_cast<const float*>(turn);
}

// `large`, or where bit 31 of `which` is 0 `small`; negative where bit 31 of `signs` is 0.
__device__ float one_of_two(unsigned signs, unsigned which, float small, float large) {
    return signed_scale(signs, (which & 0x80000000u) != 0u ? large : small);
}

__device__ float4 four_of_two(unsigned signs, unsigned which, float small, float large) {
    return make_float4(one_of_two(signs, which, small, large), one_of_two(signs << 1, which << 1, small, large),
                       one_of_two(signs << 2, which << 2, small, large), one_of_two(signs << 3, which << 3, small, large));
}

// A thread's groups of four in a packet, every one at the same place of its words.
class Stat2 {
  public:
    static constexpr int BITS = 2;
    static constexpr int SCALES = 2;

    __device__ explicit Stat2(const unsigned char* codes)
        : words(codes + threadIdx.x / 8 * 4), shift(threadIdx.x % 8 * 4) {}

    __device__ void advance(long long bytes) { words += bytes; }

    __device__ float4 decode(int k, Scales<2> scales) const {
        const unsigned signs = *reinterpret_cast<const unsigned*>(words + k * (THREADS / 2));
        const unsigned which = *reinterpret_cast<const unsigned*>(words + BLOCK_SIZE / 8 + k * (THREADS / 2));
        return four_of_two(reversed(signs >> shift), reversed(which >> shift), scales.value[0], scales.value[1]);
    }

    // What a thread knows of the block that it encodes together with the others.
    class Encoder {
      public:
        static constexpr bool LOOKS_FIRST = true;

        __device__ void look(float4 value) {
            const float* turn = turn_of(value);
#pragma unroll
            for (int i = 0; i < SUMS_EACH; ++i)
                for (int at = first(i); at < TURN; at += SUMS) {
                    const double wide = turn[at];
                    squares[i] += wide * wide;
                }
        }

        // After all groups were looked at.
        __device__ void decide(int valid) {
            const double mean = add_halves(squares) / static_cast<double>(valid > 0 ? valid : 1);
            split = static_cast<float>(sqrt(mean) * SPLIT);
        }

        __device__ void see(float4 value, int at, int valid) {
            const unsigned large = large_bits(value, at, valid);
            count += (large & 1u) + (large >> 1 & 1u) + (large >> 2 & 1u) + (large >> 3);
            const float* turn = turn_of(value);
#pragma unroll
            for (int i = 0; i < SUMS_EACH; ++i)
                for (int place = first(i); place < TURN; place += SUMS) {
                    const float magnitude = fabsf(turn[place]);
                    const bool is_large = magnitude >= split;
                    sums_of_small[i] += is_large ? 0.0f : magnitude;
                    sums_of_large[i] += is_large ? magnitude : 0.0f;
                }
        }

        // After all groups were seen.
        __device__ void settle(float* scales_of_block, int valid) {
            const unsigned larger = reduce_block<Count>(count);
            const unsigned smaller = static_cast<unsigned>(valid) - larger;
            small = add_halves(sums_of_small) / static_cast<float>(smaller > 0u ? smaller : 1u);
            __syncthreads();
            large = add_halves(sums_of_large) / static_cast<float>(larger > 0u ? larger : 1u);
            const float both = small + large;
            if (!(fabsf(both) <= LARGEST_FLOAT)) small = large = both;
            if (threadIdx.x == 0) {
                scales_of_block[0] = small;
                scales_of_block[1] = large;
            }
        }

        // Writes the codes of a group, by all threads at once, and gives what they lose.
        __device__ float4 put(float4 value, int at, int valid, unsigned char* codes) const {
            const unsigned signs = sign_bits(value, at, valid);
            const unsigned which = large_bits(value, at, valid);
            store_bits(signs, at, codes);
            store_bits(which, at, codes + BLOCK_SIZE / 8);
            const float4 sent = four_of_two(reversed(signs), reversed(which), small, large);
            return make_float4(value.x - sent.x, value.y - sent.y, value.z - sent.z, value.w - sent.w);
        }

      private:
        // The place in a turn of what this thread's i-th sum begins with; behind it where the thread has none.
        __device__ static int first(int i) {
            const int sum = static_cast<int>(threadIdx.x) + i * THREADS;
            return sum < SUMS ? sum : TURN;
        }

        __device__ unsigned large_bits(float4 value, int at, int valid) const {
            return (at < valid && fabsf(value.x) >= split ? 1u : 0u) |
                   (at + 1 < valid && fabsf(value.y) >= split ? 2u : 0u) |
                   (at + 2 < valid && fabsf(value.z) >= split ? 4u : 0u) |
                   (at + 3 < valid && fabsf(value.w) >= split ? 8u : 0u);
        }

        double squares[SUMS_EACH] = {};
        float sums_of_small[SUMS_EACH] = {};
        float sums_of_large[SUMS_EACH] = {};
        unsigned count = 0u;
        float split = 0.0f;
        float small = 0.0f;
        float large = 0.0f;
    };

  private:
    // Four bits, the lowest first at the top.
    __device__ static unsigned reversed(unsigned bits) {
        return bits << 31 | (bits & 2u) << 29 | (bits & 4u) << 27 | (bits & 8u) << 25;
    }

    const unsigned char* words;
    unsigned shift;  // of the first of four
};
