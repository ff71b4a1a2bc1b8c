// Elements whose momentum is kept as sign1 packets, eight a thread, and how weights move by them. Packets must be 4-byte
// aligned, everything else may lie anywhere.
//
// A part's numel counts the elements of a range, which begins at number `first` of the bucket. A thread takes the
// elements whose numbers in the bucket begin at a multiple of ELEMENTS_PER_THREAD; the first and the last of a range may
// be fewer. They lie in one block, so that there is one scale, and their signs are one byte.

constexpr int EACH = ELEMENTS_PER_THREAD;

static_assert(EACH == 8, "the signs of a thread's elements are a byte");

// The size of the step, the factor of the weights, and the two keys of their rounding's seed.
struct Step {
    float lr;
    float decay;
    unsigned first_key;
    unsigned second_key;
};

// Number of the range's first element and of the first eight; how a block's number is divided by those of a row: 2n times
// the factor, shifted by 32 and this; and whether every whole eight lies aligned to fours, in all that the range is of.
struct Range {
    long long first;
    unsigned octet;
    unsigned factor;
    unsigned shift;
    unsigned aligned;
};

static_assert(sizeof(Step) == 16 && sizeof(Range) == 24, "no gaps between members");

// Eight elements: where they begin, in the bucket divided by eight, and within the range, which the first may precede.
struct Octet {
    unsigned number;
    long long at;
};

__device__ Octet find_octet(Range range) {
    Octet octet;
    octet.number = range.octet + blockIdx.x * THREADS + threadIdx.x;
    octet.at = static_cast<long long>(octet.number) * EACH - range.first;
    return octet;
}

// Whether all eight belong to the range; and those that do, from low to high.
__device__ bool is_whole(const Octet& octet, Part part) {
    return octet.at >= 0 && octet.at + EACH <= part.numel;
}

__device__ int low_of(const Octet& octet) { return octet.at < 0 ? static_cast<int>(-octet.at) : 0; }

__device__ int high_of(const Octet& octet, Part part) {
    const long long left = part.numel - octet.at;
    return left < 0 ? 0 : left < EACH ? static_cast<int>(left) : EACH;
}

// What the last momentum's packets say of eight elements: a scale, and a sign bit each.
struct Signs {
    float scale;
    unsigned bits;
};

__device__ Signs load_signs(const unsigned char* packets, const Octet& octet, Part part, Range range) {
    constexpr unsigned BLOCK_OCTETS = BLOCK_SIZE / EACH;
    const unsigned block = octet.number / BLOCK_OCTETS;
    const unsigned row_index = __umulhi(2 * block, range.factor) >> range.shift;
    const unsigned column = block - row_index * static_cast<unsigned>(part.row_blocks);
    const unsigned char* row = packets + row_index * part.row_bytes;
    const unsigned place = column * BLOCK_OCTETS + octet.number % BLOCK_OCTETS;
    return {reinterpret_cast<const float*>(row)[HEADER_BYTES / SCALE_BYTES + column],
            (row + SCALE_BYTES * part.row_blocks + place)[HEADER_BYTES]};
}

// `magnitude`, or where bit i is 0 its negative; 0 where the element does not move.
__device__ float signed_magnitude(unsigned bits, int i, bool moves, float magnitude) {
    const float value = __uint_as_float(__float_as_uint(magnitude) ^ (~(bits << (31 - i)) & 0x80000000u));
    return moves ? value : 0.0f;
}

// Eight values as the words of memory they lie in.
template <typename Value>
struct Words {
    static constexpr int COUNT = EACH * sizeof(Value) / 4;
    unsigned word[COUNT];

    __device__ explicit Words(const Value* values) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Line line = reinterpret_cast<const Line*>(values)[half];
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i) word[half * (COUNT / 2) + i] = line.word[i];
        }
    }

    __device__ void store(Value* values) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Line line;
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i) line.word[i] = word[half * (COUNT / 2) + i];
            reinterpret_cast<Line*>(values)[half] = line;
        }
    }

  private:
    struct alignas(4 * sizeof(Value)) Line {
        unsigned word[COUNT / 2];
    };
};

__device__ float value_at(const Words<float>& words, int i) { return __uint_as_float(words.word[i]); }

__device__ float value_at(const Words<BFloat16>& words, int i) {
    return __uint_as_float(i % 2 == 0 ? words.word[i / 2] << 16 : words.word[i / 2] & 0xffff0000u);
}

__device__ float value_at(const Words<Float16>& words, int i) {
    return widen(Float16{static_cast<unsigned short>(words.word[i / 2] >> 16 * (i % 2))});
}

// A pair of values, of which none may be NaN, rounded by a random half each.
__device__ void round_pair(Words<float>& words, int pair, float first, float second, unsigned) {
    words.word[2 * pair] = __float_as_uint(first);
    words.word[2 * pair + 1] = __float_as_uint(second);
}

__device__ void round_pair(Words<BFloat16>& words, int pair, float first, float second, unsigned random) {
    words.word[pair] = __byte_perm(__float_as_uint(first) + (random & 0xffffu),
                                   __float_as_uint(second) + (random >> 16), 0x7632);
}

__device__ void round_pair(Words<Float16>& words, int pair, float first, float second, unsigned random) {
    Float16 low;
    Float16 high;
    round_at_random(first, random & 0xffffu, low);
    round_at_random(second, random >> 16, high);
    words.word[pair] = low.bits | static_cast<unsigned>(high.bits) << 16;
}

// Eight weights that are all there, aligned to fours; false where one of them becomes NaN, and all stay what they were.
template <typename Weight>
__device__ bool move_whole(Weight* weights, const unsigned char* codes, const Signs& signs, unsigned number,
                           Step step) {
    Words<Weight> words(weights);
    const Words<unsigned char> bytes(codes);
    const float magnitude = signs.scale * step.lr;
    float values[EACH];
    bool is_nan = false;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const bool moves = (bytes.word[i / 4] & 0xffu << 8 * (i % 4)) != 0u;
        values[i] = step.decay * value_at(words, i) - signed_magnitude(signs.bits, i, moves, magnitude);
    }
#pragma unroll
    for (int i = 0; i < EACH; i += 2) is_nan |= values[i] != values[i] || values[i + 1] != values[i + 1];
    if (is_nan) return false;
#pragma unroll
    for (int pair = 0; pair < EACH / 2; ++pair)
        round_pair(words, pair, values[2 * pair], values[2 * pair + 1],
                   random_pair(number * (EACH / 2) + pair, step.first_key, step.second_key));
    words.store(weights);
    return true;
}

// The i-th weight of eight.
template <typename Weight>
__device__ void move_one(Weight& weight, unsigned char code, const Signs& signs, unsigned number, int i, Step step) {
    const float magnitude = signed_magnitude(signs.bits, i, code != 0, signs.scale * step.lr);
    const float value = step.decay * widen(weight) - magnitude;
    const unsigned both = random_pair(number * (EACH / 2) + i / 2, step.first_key, step.second_key);
    round_at_random(value, both >> 16 * (i % 2) & 0xffffu, weight);
}
