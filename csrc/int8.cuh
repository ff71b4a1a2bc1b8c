// The int8 codec: a signed byte an element, u / scale to the nearest integer, and max |u| / 127 as the scale.

__device__ float signed_byte(unsigned word, int position) {
    return static_cast<float>(static_cast<signed char>(word >> 8 * position));
}

// A thread's groups of four in a packet.
class Int8 {
  public:
    static constexpr int BITS = 8;
    static constexpr int SCALES = 1;

    __device__ explicit Int8(const unsigned char* codes) : words(codes + threadIdx.x * 4) {}

    __device__ void advance(long long bytes) { words += bytes; }

    __device__ float4 decode(int k, Scales<1> scales) const {
        const unsigned word = *reinterpret_cast<const unsigned*>(words + k * (THREADS * 4));
        return times(make_float4(signed_byte(word, 0), signed_byte(word, 1), signed_byte(word, 2), signed_byte(word, 3)),
                     scales.value[0]);
    }

    // What a thread knows of the block that it encodes together with the others.
    class Encoder : public LargestMagnitude<127> {
      public:
        // Writes the codes of a group, by all threads at once, and gives what they lose.
        __device__ float4 put(float4 value, int at, int, unsigned char* codes) const {
            const float4 levels = round_four(in_scales(value));
            if (at < BLOCK_SIZE)
                *reinterpret_cast<unsigned*>(codes + at) =
                    low_bits(levels.x, 0xffu) | low_bits(levels.y, 0xffu) << 8 | low_bits(levels.z, 0xffu) << 16 |
                    low_bits(levels.w, 0xffu) << 24;
            return without(value, levels);
        }
    };

  private:
    const unsigned char* words;
};
