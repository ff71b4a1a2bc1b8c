// The sign1 codec: a bit an element, 1 where u >= 0, least significant first, and the mean of |u| a block.

// A thread's groups of four in a packet, every one at the same place of its word.
class Sign1 {
  public:
    static constexpr int BITS = 1;
    static constexpr int SCALES = 1;

    __device__ explicit Sign1(const unsigned char* codes)
        : words(codes + threadIdx.x / 8 * 4), shift(31u - threadIdx.x % 8 * 4) {}

    __device__ void advance(long long bytes) { words += bytes; }

    __device__ float4 decode(int k, Scales<1> scales) const {
        const unsigned word = *reinterpret_cast<const unsigned*>(words + k * (THREADS / 2));
        const float scale = scales.value[0];
        return make_float4(signed_scale(word << shift, scale), signed_scale(word << (shift - 1), scale),
                           signed_scale(word << (shift - 2), scale), signed_scale(word << (shift - 3), scale));
    }

    // What a thread knows of the block that it encodes together with the others.
    class Encoder {
      public:
        static constexpr bool LOOKS_FIRST = false;

        __device__ void see(float4 value, int, int) {
            magnitude += (fabsf(value.x) + fabsf(value.y)) + (fabsf(value.z) + fabsf(value.w));
        }

        // After all groups were seen.
        __device__ void settle(float* scale_of_block, int valid) {
            scale = reduce_block<Sum>(magnitude) / static_cast<float>(valid > 0 ? valid : 1);
            if (threadIdx.x == 0) *scale_of_block = scale;
        }

        // Writes the codes of a group, by all threads at once, and gives what they lose.
        __device__ float4 put(float4 value, int at, int valid, unsigned char* codes) const {
            const unsigned bits = sign_bits(value, at, valid);
            store_bits(bits, at, codes);
            return make_float4(value.x - signed_scale(bits << 31, scale), value.y - signed_scale(bits << 30, scale),
                               value.z - signed_scale(bits << 29, scale), value.w - signed_scale(bits << 28, scale));
        }

      private:
        float magnitude = 0.0f;
        float scale = 0.0f;
    };

  private:
    const unsigned char* words;
    unsigned shift;  // of the first of four, up to the place of a float's sign
};
