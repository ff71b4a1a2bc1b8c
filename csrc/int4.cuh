// The int4 codec: four bits an element, the first of two in a byte's lower half, u / scale to the nearest integer, and
// max |u| / 7 as the scale.

__device__ float signed_half_byte(unsigned bits, int position) {
    return static_cast<float>(static_cast<int>(bits << (28 - 4 * position)) >> 28);
}

// A thread's groups of four in a packet.
class Int4 {
  public:
    static constexpr int BITS = 4;
    static constexpr int SCALES = 1;

    __device__ explicit Int4(const unsigned char* codes) : words(codes + threadIdx.x * 2) {}

    __device__ void advance(long long bytes) { words += bytes; }

    __device__ float4 decode(int k, Scales<1> scales) const {
        const unsigned bits = *reinterpret_cast<const unsigned short*>(words + k * (THREADS * 2));
        return times(make_float4(signed_half_byte(bits, 0), signed_half_byte(bits, 1), signed_half_byte(bits, 2),
                                 signed_half_byte(bits, 3)),
                     scales.value[0]);
    }

    // What a thread knows of the block that it encodes together with the others.
    class Encoder : public LargestMagnitude<7> {
      public:
        // Writes the codes of a group, by all threads at once, and gives what they lose.
        __device__ float4 put(float4 value, int at, int, unsigned char* codes) const {
            const float4 levels = round_four(in_scales(value));
            if (at < BLOCK_SIZE)
                *reinterpret_cast<unsigned short*>(codes + at / 2) = static_cast<unsigned short>(
                    low_bits(levels.x, 0xfu) | low_bits(levels.y, 0xfu) << 4 | low_bits(levels.z, 0xfu) << 8 |
                    low_bits(levels.w, 0xfu) << 12);
            return without(value, levels);
        }
    };

  private:
    const unsigned char* words;
};
