// The int8 codec: a signed byte an element, u / scale to the nearest integer, and max |u| / 127 as the scale.

constexpr float LARGEST_LEVEL = 127.0f;

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

// A thread's groups of four in a packet.
class Int8 {
  public:
    static constexpr int BITS = 8;

    __device__ explicit Int8(const unsigned char* codes) : words(codes + threadIdx.x * 4) {}

    __device__ void advance(long long bytes) { words += bytes; }

    __device__ float4 decode(int k, float scale) const {
        const unsigned word = *reinterpret_cast<const unsigned*>(words + k * (THREADS * 4));
        return make_float4(scaled(word, 0, scale), scaled(word, 1, scale), scaled(word, 2, scale),
                           scaled(word, 3, scale));
    }

    // What a thread knows of the block that it encodes together with the others.
    class Encoder {
      public:
        __device__ void see(float4 value) {
            largest = Largest::combine(largest, magnitude_bits(value.x));
            largest = Largest::combine(largest, magnitude_bits(value.y));
            largest = Largest::combine(largest, magnitude_bits(value.z));
            largest = Largest::combine(largest, magnitude_bits(value.w));
        }

        // After all groups were seen.
        __device__ void settle(float* scale_of_block, int) {
            scale = __uint_as_float(reduce_block<Largest>(largest)) / LARGEST_LEVEL;
            if (threadIdx.x == 0) *scale_of_block = scale;
        }

        // Writes the codes of a group, by all threads at once, and gives what they lose.
        __device__ float4 put(float4 value, int at, int, unsigned char* codes) const {
            float4 levels = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (scale > 0.0f && scale <= LARGEST_FLOAT)
                levels = make_float4(level(value.x, scale), level(value.y, scale), level(value.z, scale),
                                     level(value.w, scale));
            if (at < BLOCK_SIZE)
                *reinterpret_cast<unsigned*>(codes + at) =
                    byte_of(levels.x, 0) | byte_of(levels.y, 1) | byte_of(levels.z, 2) | byte_of(levels.w, 3);
            return make_float4(value.x - levels.x * scale, value.y - levels.y * scale, value.z - levels.z * scale,
                               value.w - levels.w * scale);
        }

      private:
        unsigned largest = 0u;
        float scale = 0.0f;
    };

  private:
    const unsigned char* words;
};
